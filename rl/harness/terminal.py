"""Terminal tools: a shell whose directory and exported variables last from call to call, and commands in the background.

No process lives between two calls: the shell's state is a file in the sandbox, read before a command and written after it. A
command that hangs is killed with all that it started, and the next call finds the state as the last whole command left it.
"""

import shlex

from rl.environments.sandbox import ExecResult
from rl.harness.schema import ToolError, tool
from rl.harness.session import Session

STATE = "${HOME:-/tmp}/.shell"  # then /env: `export -p`, /cwd; jobs/N: a background command's output, pid and exit code
MAX_SECONDS = 600
MAX_JOBS = 32
CHECK_SECONDS = 10
# Which processes belong to which command is the backend's to say: its mark is not restored.
ENTER = f"""s={STATE}; mark=$ANYRUN_SANDBOX; mkdir -p "$s/jobs"
[ -r "$s/env" ] && . "$s/env"
[ -n "$mark" ] && export ANYRUN_SANDBOX="$mark"
"""
RETURN = f"""[ -r {STATE}/cwd ] && cd "$(cat {STATE}/cwd)" 2> /dev/null
"""
# The state is written by the shell that ran the command, whatever way it exits; each file by rename.
LEAVE = f"""trap 'code=$?; s={STATE}
export -p > "$s/env.$$" && mv "$s/env.$$" "$s/env"
pwd > "$s/cwd.$$" && mv "$s/cwd.$$" "$s/cwd"
exit $code' EXIT
"""
START = """setsid sh -c 'echo $$ > "$0.pid"; sh -c "$1"; echo $? > "$0.exit"' {job} {command} > {job}.out 2>&1 < /dev/null &
"""
KILL = """[ -e {job}.exit ] && exit 3
exec 2> /dev/null
p=$(cat {job}.pid)
kill -TERM -- "-$p"; sleep 0.2; kill -KILL -- "-$p"
echo 137 > {job}.exit
"""


def ending(result: ExecResult) -> str:
    if result.reason == "timeout":
        return f"(stopped after {result.seconds:.0f} s: it did not end; use background for servers)"
    if result.reason == "idle":
        return "(stopped: no output for too long)"
    if result.reason == "oom":
        return "(killed: out of memory)"
    return "" if result.ok else f"(exit code {result.exit_code})"


@tool
def shell(session: Session, command: str, timeout_s: int = 60, cwd: str = "", background: bool = False) -> str:
    """Runs a shell command and gives its output. Directory and exported variables last until the next call. No terminal, no input.

    command     for sh
    timeout_s   seconds until it is stopped, 1 to 600
    cwd         directory to run it in; empty: where the last command ended
    background  start it and go on; shell_output gives what it printed
    """
    if not 1 <= timeout_s <= MAX_SECONDS:
        raise ToolError(f"timeout_s: expected 1 to {MAX_SECONDS}, got {timeout_s}")
    enter = ENTER + (f"cd {shlex.quote(session.argument(cwd))} || exit 125\n" if cwd else RETURN)
    if background:
        if len(session.jobs) >= MAX_JOBS:
            raise ToolError(f"background: expected at most {MAX_JOBS} commands")
        number = len(session.jobs) + 1
        script = enter + START.format(job=job_file(number), command=shlex.quote(command))
        started = session.sandbox.exec(script, cwd=session.workdir, timeout_s=10)
        if not started.ok:
            return session.text(f"{started.text}{ending(started)}")
        session.jobs[number] = command
        return f"Started as job {number}"
    script = enter + LEAVE + f"eval {shlex.quote(command)}"
    result = session.sandbox.exec(script, cwd=session.workdir, timeout_s=timeout_s)
    text = result.text
    if result.dropped:
        text += f"\n({result.dropped} bytes of output were cut)"
    return session.text("\n".join(filter(None, [text.rstrip("\n"), ending(result)]))) or "(no output)"


def job_file(number: int) -> str:
    return f'"{STATE}/jobs/{number}"'


def job_of(session: Session, job: int) -> str:
    if job not in session.jobs:
        raise ToolError(f"job: expected one of {sorted(session.jobs) or 'none so far'}, got {job}")
    return job_file(job)


@tool
def shell_output(session: Session, job: int, wait_s: int = 0) -> str:
    """Gives what a background command has printed, and whether it has ended.

    job     its number
    wait_s  wait up to so many seconds for its end, 0 to 600
    """
    if not 0 <= wait_s <= MAX_SECONDS:
        raise ToolError(f"wait_s: expected 0 to {MAX_SECONDS}, got {wait_s}")
    file = job_of(session, job)
    wait = f"i=0; while [ $i -lt {wait_s * 5} ] && [ ! -e {file}.exit ]; do sleep 0.2; i=$((i+1)); done; "
    result = session.sandbox.exec(f"{wait}cat {file}.out; echo; cat {file}.exit 2>/dev/null || echo running", timeout_s=wait_s + 20)
    text, _, state = result.stdout.decode(errors="replace").rstrip("\n").rpartition("\n")
    state = "(running)" if state == "running" else f"(ended with exit code {state})"
    return session.text("\n".join(filter(None, [text.strip("\n"), state])))


@tool
def shell_kill(session: Session, job: int) -> str:
    """Ends a background command and all that it started.

    job  its number
    """
    file = job_of(session, job)
    result = session.sandbox.exec(KILL.format(job=file), timeout_s=20)
    return f"Job {job} had ended" if result.exit_code == 3 else f"Ended job {job}"


@tool
def run_check(session: Session, path: str = "check.py") -> str:
    """Runs a file of checks with Python and gives what it prints.

    path  relative to the work directory, or absolute
    """
    # -B: a compiled file of a source that changed within the same second, to as many bytes, would be taken for new.
    result = session.run("python3", "-B", session.argument(path), timeout_s=CHECK_SECONDS)
    return session.text("\n".join(filter(None, [result.text.rstrip("\n"), ending(result)]))) or "(no output)"


OPTIONAL_TERMINAL_TOOLS = (run_check,)
TERMINAL_TOOLS = (shell, shell_output, shell_kill)
