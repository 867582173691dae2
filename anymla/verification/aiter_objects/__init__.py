"""AITER's own code objects on the emulator: what the kernels of the AITER that is here do."""
