"""The registry: ids, collisions, lazy imports, entry points of other packages."""

import json
import subprocess
import sys
import textwrap

import pytest

from k3rl.envs.base import EnvSpec, ToolEnv
from k3rl.envs.registry import BUILTINS, Registry
from k3rl.errors import EnvError
from k3rl.types import from_plain, to_plain

HUNT = "k3rl.envs.file_hunt:FileHunt"


@pytest.fixture
def registry():
    return Registry(group=None)


def test_builtins(registry):
    assert registry.ids() == ["k3rl/CodeRepair-v0", "k3rl/FileHunt-v0", "k3rl/Reason-v0"]
    for id in registry.ids():
        env = registry.make(id)
        assert isinstance(env, ToolEnv)
        assert env.spec == registry.spec(id)
        assert registry.make(id) is not env
        assert all(callable(registry.policy(id, name)) for name in ("oracle", "random", "null"))


@pytest.mark.parametrize(
    "id", ["FileHunt-v0", "k3rl/FileHunt", "k3rl/FileHunt-v", "k3rl/a/b-v0", "", "k3rl/X-v0\n"]
)
def test_bad_ids(registry, id):
    with pytest.raises(EnvError, match="ns/Name-vN"):
        registry.register(id, HUNT)


def test_collision_names_the_holder(registry):
    with pytest.raises(EnvError, match=r"k3rl/FileHunt-v0: already registered, to k3rl\.envs"):
        registry.register("k3rl/FileHunt-v0", HUNT)


def test_versions_only_rise(registry):
    registry.register("acme/Hunt-v2", HUNT)
    with pytest.raises(EnvError, match="downgrade, acme/Hunt-v2 is registered"):
        registry.register("acme/Hunt-v1", HUNT)
    registry.register("acme/Hunt-v10", HUNT)
    registry.register("other/Hunt-v1", HUNT)
    assert {"acme/Hunt-v2", "acme/Hunt-v10", "other/Hunt-v1"} < set(registry.ids())


def test_unknown_id_names_the_nearest(registry):
    for use in (registry.make, registry.spec, lambda id: registry.policy(id, "oracle")):
        with pytest.raises(EnvError, match=r"k3rl/FileHnt-v0.*nearest is k3rl/FileHunt-v0"):
            use("k3rl/FileHnt-v0")


def test_unknown_policy_names_those_there_are(registry):
    with pytest.raises(EnvError, match="it has: demonstrator, null, oracle, random"):
        registry.policy("k3rl/FileHunt-v0", "cheat")


def test_kwargs_reach_the_class_and_the_spec(registry):
    registry.register("acme/Short-v0", HUNT, max_pointers=1)
    env = registry.make("acme/Short-v0")
    assert env.spec.kwargs == {"max_pointers": 1}
    assert {env.task("train", index).metadata["num_pointers"] for index in range(30)} == {1}
    assert registry.make("acme/Short-v0", max_pointers=2).spec.kwargs == {"max_pointers": 2}
    spec = registry.spec("acme/Short-v0")
    spec.kwargs.clear()
    assert registry.spec("acme/Short-v0").kwargs == {"max_pointers": 1}
    again = from_plain(EnvSpec, json.loads(json.dumps(to_plain(env.spec))))
    assert registry.make(again.id, **again.kwargs).spec.digest == env.spec.digest


def test_bad_kwargs_are_named(registry):
    with pytest.raises(EnvError, match=r"k3rl/FileHunt-v0.*pointers"):
        registry.make("k3rl/FileHunt-v0", pointers=2)
    with pytest.raises(EnvError, match="kwargs must be JSON"):
        registry.make("k3rl/FileHunt-v0", max_pointers=object())


@pytest.mark.parametrize("where", ["no_such_module:X", "k3rl.envs.file_hunt:Nothing", "json"])
def test_bad_entry_points_fail_when_made(registry, where):
    registry.register("acme/Broken-v0", where)
    with pytest.raises(EnvError, match="acme/Broken-v0: cannot load"):
        registry.make("acme/Broken-v0")


def test_decorator_registers_the_class_itself(registry):
    def play(task, transcript, rng):
        raise NotImplementedError

    @registry.register("acme/Local-v0", policies={"oracle": play}, nondeterministic=True)
    class Local:
        def __init__(self, spec):
            self.spec = spec

    env = registry.make("acme/Local-v0")
    assert isinstance(env, Local)
    assert env.spec.nondeterministic
    assert env.spec.entry_point.endswith("Local")
    assert registry.policy("acme/Local-v0", "oracle") is play


def test_registries_do_not_share(registry):
    registry.register("acme/Mine-v0", HUNT)
    assert Registry(group=None).ids() == [entry.id for entry in BUILTINS]


def python(code, *paths):
    argv = [sys.executable, "-c", textwrap.dedent(code), *map(str, paths)]
    return subprocess.run(argv, capture_output=True, text=True)


def test_importing_the_registry_is_light():
    done = python("""
        import sys
        from k3rl.envs import registry
        registry.spec("k3rl/FileHunt-v0")
        heavy = {"gymnasium", "reasoning_gym", "torch", "ray", "k3rl.envs.file_hunt"}
        sys.exit(", ".join(sorted(heavy & set(sys.modules))) or 0)
    """)
    assert done.returncode == 0, done.stderr


def test_making_one_imports_no_gymnasium():
    done = python("""
        import sys
        from k3rl.envs import registry
        for id in ("k3rl/FileHunt-v0", "k3rl/Reason-v0"):
            registry.make(id)
            registry.policy(id, "oracle")
        sys.exit(", ".join(sorted({"gymnasium", "reasoning_gym", "torch"} & set(sys.modules))) or 0)
    """)
    assert done.returncode == 0, done.stderr


def distribution(folder, name, module, source):
    """A package as an installer lays it down: a module and a dist-info with an entry point."""
    folder.joinpath(f"{module}.py").write_text(textwrap.dedent(source))
    info = folder / f"{name}-1.0.dist-info"
    info.mkdir()
    info.joinpath("METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    info.joinpath("entry_points.txt").write_text(f"[k3rl.envs]\n{name} = {module}\n")


PLUGIN = """
    from k3rl.envs import registry
    registry.register("acme/Hunt-v1", "k3rl.envs.file_hunt:FileHunt", max_pointers=1)
"""


def test_entry_points_are_imported_at_the_first_unknown_id(tmp_path):
    distribution(tmp_path, "acme", "acme_envs", PLUGIN)
    done = python(
        """
        import sys
        sys.path.insert(0, sys.argv[1])
        from k3rl.envs import registry
        registry.make("k3rl/FileHunt-v0")
        assert "acme_envs" not in sys.modules
        assert registry.make("acme/Hunt-v1").spec.kwargs == {"max_pointers": 1}
        assert "acme/Hunt-v1" in registry.ids()
        """,
        tmp_path,
    )
    assert done.returncode == 0, done.stderr


def test_a_broken_entry_point_is_named_and_harms_no_other(tmp_path):
    distribution(tmp_path, "broken", "broken_envs", "import no_such_thing")
    distribution(tmp_path, "acme", "acme_envs", PLUGIN)
    done = python(
        """
        import sys, warnings
        sys.path.insert(0, sys.argv[1])
        from k3rl.envs import registry
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            assert "acme/Hunt-v1" in registry.ids()
        assert "broken = broken_envs" in str(caught[0].message), caught
        try:
            registry.make("acme/Nothing-v0")
        except Exception as error:
            print(error)
        """,
        tmp_path,
    )
    assert done.returncode == 0, done.stderr
    assert "no environment 'acme/Nothing-v0'" in done.stdout
    assert "broken = broken_envs cannot be loaded" in done.stdout
