"""What the recommended XLA options change, and what a user's own setting does to them."""

import pytest
from targets.compiled import compiled

from jpipe import targets

LATENCY = "xla_gpu_enable_latency_hiding_scheduler"
GRAPH_SIZE = "xla_gpu_graph_min_graph_size"


def hidden(found):
    """For each exchange, whether a matrix is multiplied meanwhile."""
    starts = [i for i in found.loop if i.opcode == "collective-permute-start"]
    assert len(starts) == 2
    return [any(found.num_matmuls(i) for i in found.between(start)) for start in starts]


def captured(found):
    """For each conditional, whether it is part of a CUDA graph."""
    conditionals = [thunk for thunk in found.thunks if thunk[-1] == "kConditional"]
    assert conditionals
    return ["kCommandBuffer" in thunk for thunk in conditionals]


@pytest.mark.targets
def test_a100_hides_exchanges_with_the_latency_hiding_scheduler_only():
    assert all(hidden(compiled("a100", "1f1b-overlap")))
    assert not all(hidden(compiled("a100", "1f1b-overlap", without=(LATENCY,))))


@pytest.mark.targets
@pytest.mark.parametrize("schedule", ["1f1b", "1f1b-overlap"])
def test_every_conditional_is_part_of_a_graph(schedule):
    found = compiled("h100", schedule)
    count = sum(i.opcode == "conditional" for i in found.in_loop())
    assert captured(found) == [True] * count


def test_only_gpus_need_options():
    assert set(targets.compiler_options("gpu")) == {LATENCY, GRAPH_SIZE}
    assert targets.compiler_options("tpu") == targets.compiler_options("cpu") == {}


def test_what_the_user_set_holds(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", f"--xla_dump_to=x --{LATENCY}=false")
    assert set(targets.compiler_options("gpu")) == {GRAPH_SIZE}


def test_options_are_a_copy():
    targets.compiler_options("gpu").clear()
    assert targets.compiler_options("gpu")


def test_an_unknown_target_is_refused():
    with pytest.raises(ValueError, match="name='h1000' is no target; choose from a100, h100, v5e"):
        targets.topology("h1000")


@pytest.mark.parametrize(
    ("target", "package"), [("h100", "jax[cuda12-local]"), ("v5e", "jax[tpu]")]
)
def test_a_missing_compiler_is_named(target, package, monkeypatch):
    monkeypatch.setattr(targets.importlib.util, "find_spec", lambda module: None)
    with pytest.raises(ValueError, match="is not installed") as caught:
        targets.topology(target)
    assert package in str(caught.value)


def test_a_compiler_that_is_not_loaded_says_how(monkeypatch):
    def unknown(*args, **options):
        raise NotImplementedError("topology not implemented for cuda")

    monkeypatch.setattr(targets.importlib.util, "find_spec", lambda module: module)
    monkeypatch.setattr(targets.topologies, "get_topology_desc", unknown)
    with pytest.raises(ValueError, match=r"name='h100'.*JAX_PLATFORMS=cpu"):
        targets.topology("h100")
