"""AMD machine code on a CPU: the assembly that Triton emits, executed by numpy, with checks no chip gives."""
