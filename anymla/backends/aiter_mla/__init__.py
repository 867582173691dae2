"""AITER's MLA kernels on ROCm: bound by name, planned from its own tables, never launched outside them.

Nothing is imported here: the manifest is asked about AITER on machines without torch and without AITER.
"""
