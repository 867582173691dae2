"""What a plan of each operation holds, at most, before there is a step."""

from anymla.backends.triton_mla.decode import decode_workspace_bytes
from anymla.backends.triton_mla.index_topk import index_workspace_bytes
from anymla.backends.triton_mla.prefill import prefill_workspace_bytes
from anymla.hardware.probe import Machine
from anymla.problem import Problem


def workspace_bytes(
    problem: Problem, machine: Machine, num_seqs: int, num_tokens: int, max_seq_len: int, context_tokens: int
) -> int:
    """The most bytes that a plan with these bounds holds; `run` needs no more beside its outputs.

    Args:
        problem: Facts of the call.
        machine: The chip.
        num_seqs: B, of a decode and a prefill.
        num_tokens: T, of a sparse decode, a prefill and a top-k.
        max_seq_len: Keys of the longest sequence, of a decode and a top-k.
        context_tokens: Cached tokens of all sequences together, of a prefill.

    Returns:
        Bytes; 0 for a cache write, which has no plan.
    """
    match problem.op:
        case "decode":
            return decode_workspace_bytes(problem, machine, num_seqs, max_seq_len)
        case "sparse_decode":
            return decode_workspace_bytes(problem, machine, num_tokens, problem.topk)
        case "prefill":
            return prefill_workspace_bytes(problem, machine, num_tokens, num_seqs, context_tokens)
        case "index_topk":
            return index_workspace_bytes(problem, machine, num_tokens, max_seq_len)
    return 0
