"""The registry: ids, collisions, lazy imports, entry points of other packages."""

import json
import subprocess
import sys
import textwrap

import pytest

from k3rl.envs.base import EnvSpec, ToolEnv
from k3rl.envs.entries import BUILTINS
from k3rl.envs.file_hunt import FileHunt
from k3rl.envs.registry import Registry
from k3rl.errors import EnvError
from k3rl.types import from_plain, to_plain

HUNT = "k3rl.envs.file_hunt:FileHunt"


@pytest.fixture
def registry():
    return Registry(group=None)


def test_builtins(registry):
    names = ("CodeRepair", "FileHunt", "Reason", "Terminal")
    assert registry.ids() == [f"k3rl/{name}-v0" for name in names]
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
    with pytest.raises(EnvError, match=r"FileHunt-v0: already registered by k3rl, to k3rl\.envs"):
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
    with pytest.raises(EnvError, match="cheat/twice, demonstrator, null, oracle, random"):
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
    class Local(FileHunt):
        """Its own class, known by no other name."""

    env = registry.make("acme/Local-v0")
    assert isinstance(env, Local)
    assert env.spec.nondeterministic
    assert env.spec.entry_point.endswith("Local")
    assert registry.policy("acme/Local-v0", "oracle") is play


def test_what_is_no_tool_env_is_refused_when_made(registry):
    registry.register("acme/Plain-v0", "types:SimpleNamespace")
    registry.register("acme/Number-v0", "math:pi")
    registry.register("acme/Cls-v0", "tests.envs.test_registry:NoTools")
    for id, says in (
        ("acme/Plain-v0", "SimpleNamespace"),
        ("acme/Number-v0", "is no class"),
        ("acme/Cls-v0", r"no ToolEnv, it lacks \['act', .*'tools'\]"),
    ):
        with pytest.raises(EnvError, match=f"{id}.*{says}"):
            registry.make(id)


class NoTools:
    def __init__(self, spec):
        self.spec = spec


def test_kwargs_of_a_wrong_type_are_named(registry):
    with pytest.raises(EnvError, match=r"k3rl/FileHunt-v0: .*FileHunt cannot be made: TypeError"):
        registry.make("k3rl/FileHunt-v0", max_pointers="three")


def test_missing_packages_say_what_to_install(registry):
    registry.register("acme/Needy-v0", HUNT, needs=["no-such-dist"])
    with pytest.raises(EnvError, match="acme/Needy-v0 needs no-such-dist: pip install no-such-di"):
        registry.make("acme/Needy-v0")
    registry.register("acme/Lazy-v0", "no_such_package.envs:Env")
    with pytest.raises(
        EnvError, match=r"acme/Lazy-v0: cannot load .*: pip install no-such-package"
    ):
        registry.make("acme/Lazy-v0")


@pytest.mark.parametrize("policy", [3, None, "module", "module:", ":name", "a b:c"])
@pytest.mark.parametrize("what", ["policies", "cheats"])
def test_bad_policies_are_refused_when_registered(registry, policy, what):
    with pytest.raises(EnvError, match="acme/Bad-v0: policy 'oracle' must be"):
        registry.register("acme/Bad-v0", HUNT, **{what: {"oracle": policy}})
    assert "acme/Bad-v0" not in registry.names()


def test_policies_that_cannot_be_loaded_are_named(registry):
    where = {"oracle": "k3rl.envs.file_hunt:no_such", "random": "k3rl.envs.file_hunt:MAX_POINTERS"}
    registry.register("acme/Odd-v0", HUNT, policies=where)
    assert registry.policies("acme/Odd-v0") == ["oracle", "random"]
    with pytest.raises(EnvError, match=r"acme/Odd-v0: cannot load .*no_such"):
        registry.policy("acme/Odd-v0", "oracle")
    with pytest.raises(EnvError, match=r"'random': .*MAX_POINTERS is no function"):
        registry.policy("acme/Odd-v0", "random")


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
        for id in ("k3rl/FileHunt-v0", "k3rl/Reason-v0", "k3rl/Terminal-v0"):
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
        assert "package broken: entry point broken = broken_envs" in str(caught[0].message), caught
        assert registry.problems() == [str(each.message) for each in caught]
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


@pytest.mark.parametrize(
    ("name", "id", "says"),
    [
        ("zeta", "acme/Hunt-v1", "acme/Hunt-v1: already registered by acme, to"),
        ("zeta", "acme/Hunt-v0", "acme/Hunt-v0: a downgrade, acme/Hunt-v1 is registered by acme"),
        ("zeta", "acme/Hunt-v2", "acme/Hunt-v2: a version of acme/Hunt-v1, which is registered by"),
        ("zeta", "k3rl/FileHunt-v0", "k3rl/FileHunt-v0: already registered by k3rl, to"),
        ("zeta", "k3rl/FileHunt-v1", "k3rl/FileHunt-v1: a version of k3rl/FileHunt-v0, which is"),
    ],
)
@pytest.mark.parametrize("order", [1, -1])
def test_packages_cannot_take_names_of_others(tmp_path, name, id, says, order):
    """Whatever the order in which they are found on the path."""
    folders = [tmp_path / "one", tmp_path / "two"]
    for folder in folders:
        folder.mkdir()
    distribution(folders[0], "acme", "acme_envs", PLUGIN)
    source = f"from k3rl.envs import registry\nregistry.register({id!r}, {HUNT!r})\n"
    distribution(folders[1], name, f"{name}_envs", source)
    done = python(
        """
        import sys
        sys.path[:0] = sys.argv[1:]
        from k3rl.envs import registry
        print(registry.package("acme/Hunt-v1"), registry.package("k3rl/FileHunt-v0"))
        print(registry.problems())
        """,
        *folders[::order],
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("acme k3rl\n")
    assert says in done.stdout
    assert done.stdout.count("package zeta: entry point zeta = zeta_envs cannot be loaded") == 1


def test_gymnasium_makes_what_a_package_registered(tmp_path):
    distribution(tmp_path, "acme", "acme_envs", PLUGIN)
    done = python(
        """
        import functools, sys
        from pathlib import Path
        sys.path.insert(0, sys.argv[1])
        import gymnasium
        from k3rl.blobs import BlobStore
        from k3rl.envs.gym import register_gym
        from k3rl.sandboxes.factory import open_backend
        register_gym()
        here = Path(sys.argv[1])
        opener = functools.partial(open_backend, "bwrap", BlobStore(here / "b"), here / "s")
        env = gymnasium.make("acme/Hunt-v1", backend=opener)
        (message,), info = env.reset(seed=0)
        assert info["task"]["env_id"] == "acme/Hunt-v1"
        assert info["task"]["metadata"]["num_pointers"] == 1
        env.close()
        """,
        tmp_path,
    )
    assert done.returncode == 0, done.stderr
