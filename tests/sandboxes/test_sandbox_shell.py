"""A shell goes on from command to command, though nothing of a command outlives it."""

import asyncio
import json
import random
import subprocess
from dataclasses import replace

import pytest

from k3rl.errors import CapabilityMissing, UserInputError
from k3rl.sandboxes.base import ExecRequest, run
from k3rl.sandboxes.shell import STATE_BYTES, Shell
from k3rl.types import Snapshot, from_plain, to_plain
from tests.sandboxes.sandbox_helpers import ANY, opened, play

pytestmark = pytest.mark.sandbox
KINDS = ("bwrap", "docker", "process", "bytes")
SPEC = replace(ANY, executables=("bash",))


@pytest.fixture(params=KINDS)
def kind(request):
    if request.param == "docker":
        request.getfixturevalue("docker_engine")
    return request.param


async def fresh(backend, state=None) -> Shell:
    return Shell(backend, await backend.create(SPEC), state)


async def said(shell, script, **options) -> str:
    """Output of a script that has nothing to complain about."""
    result = await shell.run(script, **options)
    assert (result.exit_code, result.stderr, result.timed_out) == (0, b"", False), result
    assert result.channel == b""
    return result.stdout.decode()


SET = r"""
shopt -s extglob nullglob; shopt -u sourcepath
mkdir -p "d/e f"; cd "d/e f"
plain=1; export exported=$'a\nb\t"\'\\ $HOME \x01'; readonly fixed=2; declare -i number=3
declare -A table=([a]=1 ['b c']=$'2\n3'); list=(1 '2 3' "4"); list[7]=8; declare -u loud=shout
declare -n other=plain; IFS=:
greet() { local name=$1; echo "hello $name"; }
export -f greet; RING() { echo ring; }; export -f RING
my-func() { case $1 in +([0-9])) echo number;; esac; }
alias ll='echo listed'; alias -- -='cd -'
umask 027
set -o pipefail; set -u
trap 'echo interrupted' USR1; trap '' USR2
set -- 'first one' second
cd ..; cd "$OLDPWD"
"""
GET = r"""
echo "$PWD|$plain|$fixed|$number|${table[a]}|${list[1]}|${list[7]}|$loud|$other|${#IFS}"
printf %s "${table[b c]}" "$exported" | od -An -c | tr -d ' \n'; echo
env | grep -c ^exported=; env | grep -c ^plain= || :
greet you; bash -c 'greet child; RING'; my-func 12
ll; umask; echo "$1,$#"
[[ -o pipefail ]] && echo 1; shopt -q extglob nullglob; echo $?; shopt -q sourcepath || echo off
kill -USR1 $$; kill -USR2 $$; number+=4; echo $number; loud=more; echo $loud
cd - ; (fixed=9) 2>/dev/null || echo readonly
"""


def test_everything_a_shell_knows_goes_on(kind, tmp_path):
    async def body(backend):
        shell = await fresh(backend)
        root = (await said(shell, "pwd")).strip()
        # A byte of it is a line's end to Python.
        assert await said(shell, SET.replace("RING", "f\u00c5")) == ""
        expected = [
            f"{root}/d/e f|1|2|3|1|2 3|8|SHOUT|1|1",
            r"""2\n3a\nb\t"'\$HOME001""",
            "1", "0", "hello you", "hello child", "ring", "number", "listed", "0027", "first one,2",
            "1", "0", "off", "interrupted", "7", "MORE", f"{root}/d", "readonly",
        ]  # fmt: skip
        result = await shell.run(GET.replace("RING", "f\u00c5"))
        assert result.stdout.decode().splitlines() == expected
        assert result.stderr == b""
        assert (await said(shell, "echo $number; pwd")).split() == ["7", f"{root}/d"]

    play(kind, tmp_path, body)


def test_what_is_taken_away_stays_away(kind, tmp_path):
    async def body(backend):
        shell = await fresh(backend)
        await said(shell, "x=1; f() { :; }; alias a=b; trap 'echo t' USR1; set -e; set -- 1; a=(1)")
        await said(shell, "unset x LANG a; export -n HOME; unset -f f; unalias a; trap - USR1")
        await said(shell, "set +e; set --; shopt -u expand_aliases; cd; unset IFS")
        look = "echo ${x-no} ${LANG-no} ${IFS-no} $HOME; env | grep -E '^(LANG|HOME)='; declare -f"
        assert await said(shell, f"{look}; alias; trap -p; echo $- $#; ! :; :") == (
            "no no no /tmp\nhBc 0\n"
        )

    play(kind, tmp_path, body)


@pytest.mark.parametrize(
    ("script", "code"),
    [
        ("exit 3", 3),
        ("exec false", 1),
        ("exec sh -c 'exit 4'", 4),
        ("kill -9 $$", 137),
        ("kill -TERM $$", 143),
        ("set -u; echo $nowhere", 127),
        ("set -e; false", 1),
        ("if then", 2),
        ("f() { exit 6; }; f", 6),
        ("set -n; exit 9", 0),
        ("echo forged >&10; exit 5", 5),
        ("builtin() { echo mine; }", None),
    ],
)
def test_a_command_that_ends_the_shell_leaves_what_was_before(script, code, tmp_path):
    async def body(backend):
        shell = await fresh(backend)
        await said(shell, "mkdir d; cd d; x=1; f() { echo kept; }")
        before = shell.state
        result = await shell.run(f"x=2; cd ..\n{script}" if script != "if then" else script)
        assert result.exit_code == code or code is None
        assert not result.timed_out
        assert shell.state == before
        assert await said(shell, "echo $x $(basename $PWD); f") == "1 d\nkept\n"

    play("bwrap", tmp_path, body)


def test_a_deadline_and_a_cancellation_leave_what_was_before(kind, tmp_path):
    async def body(backend):
        shell = await fresh(backend)
        await said(shell, "x=1")
        late = await shell.run("x=2; trap '' TERM; echo begun; sleep 60", deadline_s=0.4)
        assert (late.exit_code, late.timed_out, late.stdout) == (None, True, b"begun\n")
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(shell.run("x=3; sleep 60", deadline_s=60), 0.4)
        assert await said(shell, "echo $x") == "1\n"

    play(kind, tmp_path, body)


def test_lines_before_a_syntax_error_count_as_in_a_session(tmp_path):
    async def body(backend):
        shell = await fresh(backend)
        broken = await shell.run("x=1\necho one\nif then\nx=2")
        assert (broken.exit_code, broken.stdout) == (2, b"one\n")
        assert b"syntax error" in broken.stderr
        assert b"k3rl" not in broken.stderr
        assert b"line 3" in broken.stderr
        assert await said(shell, "echo $x") == "1\n"

    play("bwrap", tmp_path, body)


def test_an_exit_trap_runs_when_the_session_ends_and_not_before(tmp_path):
    async def body(backend):
        shell = await fresh(backend)
        assert await said(shell, "trap 'echo bye' EXIT; echo set") == "set\n"
        assert await said(shell, "echo more") == "more\n"
        assert (await shell.run("exit 2")).stdout == b"bye\n"
        assert await said(shell, "trap - EXIT; echo off") == "off\n"
        assert (await shell.run("exit 2")).stdout == b""

    play("bwrap", tmp_path, body)


def test_tracing_and_debug_traps_show_the_script_and_nothing_else(tmp_path):
    async def body(backend):
        shell = await fresh(backend)
        await shell.run("set -xv")
        traced = await shell.run("echo a")
        assert traced.stdout == b"a\n"
        assert traced.stderr == b"echo a\n++ echo a\n"
        await shell.run("set +xv")
        await shell.run("trap 'echo debug' DEBUG; trap 'echo error' ERR")
        told = await shell.run("echo a; false")
        assert told.stdout == b"debug\na\ndebug\ndebug\nerror\n"  # the last one: of the ERR trap
        await shell.run("trap - DEBUG ERR")
        assert await said(shell, "echo a") == "a\n"

    play("bwrap", tmp_path, body)


def test_the_channel_is_closed_to_what_the_script_starts(kind, tmp_path):
    there = 'os.path.exists(f"/proc/self/fd/{n}")'
    look = f"python3 -c 'import os; print([n for n in range(3, 100) if {there}])'"

    async def body(backend):
        shell = await fresh(backend)
        assert await said(shell, look) == "[]\n"
        result = await shell.run("echo x >&3")
        assert result.exit_code == 1
        assert b"Bad file descriptor" in result.stderr
        assert await said(shell, f"exec 3>file; echo in >&3; {look}; cat file") == "[3]\nin\n"
        assert await said(shell, look) == "[]\n"

    play(kind, tmp_path, body)


def test_output_and_input_are_the_scripts_own(kind, tmp_path):
    async def body(backend):
        shell = await fresh(backend)
        data = bytes(range(256)) * 300
        result = await shell.run("cat", stdin=data, max_output_bytes=1 << 20)
        assert result.stdout == data
        assert (await shell.run("cat /dev/stdin", stdin=b"named")).stdout == b"named"
        noise = "printf 'end\\0end\\0'; declare -p; printf 'end\\0' >&2"
        before = (await shell.run("x=1")).exit_code, shell.state
        result = await shell.run(noise)
        assert (result.exit_code, shell.state) == before
        assert b"end\0" in result.stderr
        big = await shell.run("head -c 3000000 /dev/zero; y=1", max_output_bytes=1000)
        assert big.dropped_bytes == 3_000_000 - 1000
        assert await said(shell, "echo $x$y") == "11\n"

    play(kind, tmp_path, body)


def test_a_script_is_in_nobodys_command_line(tmp_path):
    """Else `pkill -f` of a word in it would kill the shell."""

    async def body(backend):
        shell = await fresh(backend)
        look = "echo wordofmine; grep -l '[w]ordofmine' /proc/[0-9]*/cmdline | wc -l"
        assert await said(shell, look) == "wordofmine\n0\n"
        told = f"bash -c 'sleep 1; : wordofmine' & {look}"
        assert await said(shell, told) == "wordofmine\n1\n", "this look sees nothing"

    play("bwrap", tmp_path, body)


def test_the_state_goes_with_a_snapshot_and_into_forks(kind, tmp_path):
    async def body(backend):
        shell = await fresh(backend)
        await said(shell, "mkdir -p d/e; cd d/e; x=1; f() { echo f $x; }")
        snapshot = await backend.snapshot(shell.id, {"shell": shell.state})
        plain = json.dumps(to_plain(snapshot))
        again = from_plain(Snapshot, json.loads(plain))
        restored = Shell(backend, await backend.restore(SPEC, again), again.session["shell"])
        (twin,) = await backend.fork(shell.id, 1)
        forked = Shell(backend, twin, shell.state)
        for other in (restored, forked):
            assert await said(other, "f; pwd | grep -o d/e; x=2") == "f 1\nd/e\n"
        assert await said(shell, "f") == "f 1\n"
        assert restored.state == forked.state
        calm = await backend.snapshot(shell.id, {"shell": shell.state})
        await said(shell, "true")
        assert await backend.snapshot(shell.id, {"shell": shell.state}) == calm

    play(kind, tmp_path, body)


def test_the_state_goes_to_another_backend(tmp_path):
    async def main():
        async with opened("bwrap", tmp_path) as one, opened("process", tmp_path) as two:
            for source, target in ((one, two), (two, one)):
                shell = await fresh(source)
                await said(shell, "mkdir -p d/e; cd d; cd e; x=1; export y=2; alias l='echo $x $y'")
                snapshot = await source.snapshot(shell.id, {"shell": shell.state})
                box = await target.restore(SPEC, snapshot)
                start = await run(target, box, ExecRequest(("pwd",)))
                moved = Shell(target, box, snapshot.session["shell"])
                root = start.stdout.decode().strip()
                shown = await said(moved, "pwd; l; cd -; env | grep -c ^y=2")
                assert shown == f"{root}/d/e\n1 2\n{root}/d\n1\n"

    asyncio.run(main())


def test_a_folder_that_is_gone_is_told(tmp_path):
    async def body(backend):
        shell = await fresh(backend)
        await said(shell, "mkdir d; cd d; x=1")
        await run(backend, shell.id, ExecRequest(("rmdir", "d")))
        result = await shell.run("echo $x; pwd")
        assert result.stdout == b"1\n/workspace\n"
        assert b"d: No such file or directory" in result.stderr

    play("bwrap", tmp_path, body)


def test_big_scripts_and_states_go_on_and_too_big_ones_are_told(kind, tmp_path):
    async def body(backend):
        shell = await fresh(backend)
        long = "".join(f"v{n}='{n:0100d} {chr(228)}'\n" for n in range(2000))
        await said(shell, long)
        assert await said(shell, "echo ${v1999: -6:4} ${#v7}; true") == "1999 102\n"
        result = await shell.run(f"big=$(head -c {STATE_BYTES} /dev/zero | tr '\\0' x); v7=new")
        assert result.exit_code == 0
        assert b"too large to keep" in result.stderr
        assert await said(shell, "echo ${#big} ${#v7}") == "0 102\n"
        for wrong in ("x" * 800_000, "a\0b"):
            with pytest.raises(UserInputError, match="script"):
                await shell.run(wrong)

    play(kind, tmp_path, body)


def test_commands_of_one_shell_take_turns(tmp_path):
    async def body(backend):
        shell = await fresh(backend)
        await asyncio.gather(*(shell.run("sleep 0.02; n=$((n + 1))") for _ in range(8)))
        assert await said(shell, "echo $n") == "8\n"

    play("bwrap", tmp_path, body)


def test_no_bash_is_a_missing_capability(tmp_path):
    async def body(backend):
        box = await backend.create(replace(SPEC, environment={"PATH": "/nowhere"}))
        with pytest.raises(CapabilityMissing, match="needs bash"):
            await Shell(backend, box).run("true")
        with pytest.raises(CapabilityMissing, match="no-such-bash"):
            await backend.create(replace(ANY, executables=("no-such-bash",)))

    play("bwrap", tmp_path, body)


@pytest.mark.parametrize("state", [{"folder": "."}, {"cwd": "/"}, {"folder": 3}])
def test_a_state_that_is_none_is_named(state):
    with pytest.raises(UserInputError, match="ShellState"):
        Shell(None, "", state)


def test_any_value_goes_on_byte_for_byte(tmp_path):
    draw = random.Random(1)
    cases = [
        bytes(range(1, 256)),
        b"declare -- x=1\n\ndeclare -x y=2",
        b"'",
        b"\\\\n%b\\0101",
        b" ",
    ]
    cases += [draw.randbytes(draw.randint(1, 60)).replace(b"\0", b"") for _ in range(60)]

    async def body(backend):
        shell = await fresh(backend)
        for start in range(0, len(cases), 5):
            values = cases[start : start + 5]
            quoted = ["$'" + "".join(f"\\x{byte:02x}" for byte in data) + "'" for data in values]
            await said(shell, f'export e={quoted[0]}; a=({" ".join(quoted)}); set -- "${{a[@]}}"')
            assert json.loads(json.dumps(shell.state)) == shell.state
            for words, expected in (('"$e"', values[:1]), ('"${a[@]}"', values), ('"$@"', values)):
                result = await shell.run(f"printf '%s\\0' {words}")
                assert result.stdout.split(b"\0")[:-1] == expected

    play("bwrap", tmp_path, body)


def test_bash_is_one_that_this_was_written_for():
    told = subprocess.run(["bash", "--version"], capture_output=True, text=True, check=True).stdout
    assert int(told.split("version ")[1].split(".")[0]) >= 5
