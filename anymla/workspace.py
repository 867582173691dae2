"""How much memory a plan will hold, said before there is a step: what to set aside beside a cache."""

from anymla import select
from anymla.contract import check_count
from anymla.errors import Reasons
from anymla.hardware.probe import Machine, this_machine
from anymla.planned import module_of
from anymla.problem import Feature, Problem

BOUNDS = {
    "decode": ("num_seqs", "max_seq_len"),
    "sparse_decode": ("num_tokens",),
    "prefill": ("num_seqs", "num_tokens", "max_seq_len"),
    "index_topk": ("num_tokens", "max_seq_len"),
    "write_cache": (),
}
"""What has to be known of a step of each operation."""


def workspace_bytes(
    problem: Problem,
    *,
    num_seqs: int | None = None,
    num_tokens: int | None = None,
    max_seq_len: int | None = None,
    context_tokens: int | None = None,
    backend: str = "auto",
    machine: Machine | None = None,
) -> int | None:
    """The most bytes that a plan with these bounds holds; with `out` given, `run` allocates nothing more.

    One set of bounds does for all operations: each uses those that it has. A plan with smaller bounds holds
    no more, but that of a top-k may: more of its rows can fit a pass, so plan the largest and update it.

    Args:
        problem: What is asked, q_len the most query tokens of a sequence, with the features of the plan.
        num_seqs: B, of a decode and a prefill.
        num_tokens: T, of a sparse decode, a prefill and a top-k.
        max_seq_len: No sequence is longer, in tokens; of a decode, a prefill and a top-k.
        context_tokens: Cached tokens of all sequences of a prefill together, where the host knows their
            lengths. None: num_seqs × max_seq_len, or 0 if the problem has no CACHED_CONTEXT.
        backend: A registry name, or "auto" for the first that accepts.
        machine: The chip to ask for. None: that of this process.

    Returns:
        Bytes. 0 for a cache write, which has no plan. None where the backend sets no bound: its memory is its
        library's, or that of tensors which it makes as it goes.

    Raises:
        InvalidInput: a bound that the operation needs is missing or negative, or the problem cannot be.
        NoBackend: nothing, or not the named backend, takes the problem.
    """
    choice = select.choose(problem, this_machine() if machine is None else machine, backend)
    reasons = Reasons("workspace_bytes")
    given = {"num_seqs": num_seqs, "num_tokens": num_tokens, "max_seq_len": max_seq_len}
    unused = {name: 0 for name, value in given.items() if value is None and name not in BOUNDS[problem.op]}
    bounds = {name: check_count(reasons, name, value, 0) for name, value in (given | unused).items()}
    if context_tokens is None:
        cached = Feature.CACHED_CONTEXT in problem.features
        context_tokens = bounds["num_seqs"] * bounds["max_seq_len"] if cached else 0
    bounds["context_tokens"] = check_count(reasons, "context_tokens", context_tokens, 0)
    reasons.raise_if_any()
    if problem.op == "write_cache":
        return 0
    most = getattr(module_of(choice), "workspace_bytes", None)
    return None if most is None else int(most(problem, choice.machine, **bounds))
