"""`python -m rl tasks`: mine releases, list and build the catalogue, check that tasks are sound."""

import argparse
import json
import re
import sys
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path

from rl.environments.sandbox import SandboxError
from rl.tasks.check import check
from rl.tasks.pypi import Registry
from rl.tasks.release import Release, build, catalogue, mine
from rl.tasks.task import Task, TaskError, load, save
from rl.tasks.workspace import Sandboxes, open_sandboxes


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(prog="python -m rl tasks", description=__doc__)
    top.add_argument("--directory", type=Path, default=Path("runs/tasks"), help="keeps downloads, images and built tasks")
    commands = top.add_subparsers(dest="command", required=True)
    commands.add_parser("list", help="the catalogue")
    found = commands.add_parser("versions", help="versions of a package that have a source distribution")
    found.add_argument("package")
    found = commands.add_parser("mine", help="try two releases of a package: writes DIRECTORY/mined/PACKAGE-OLD-NEW.json")
    found.add_argument("package")
    found.add_argument("old")
    found.add_argument("new")
    found.add_argument("--with", dest="pypi", action="append", default=[], metavar="REQUIREMENT", help="the tests need; repeatable")
    found.add_argument("--times", type=int, default=2, help="runs with the reference change: tests that differ are left out")
    found = commands.add_parser("build", help="write tasks of the catalogue as directories: DIRECTORY/built/NAME")
    found.add_argument("names", nargs="*", help="all if none is given")
    found = commands.add_parser("check", help="whether the reference change passes and no change fails, every time")
    found.add_argument("names", nargs="*", help="of the catalogue, or task directories; the whole catalogue if none is given")
    found.add_argument("--times", type=int, default=5)
    return top


def main(argv: list[str]) -> int:
    arguments = parser().parse_args(argv)
    registry = Registry(arguments.directory / "sdists")
    try:
        if arguments.command == "list":
            for release in catalogue():
                print(f"{release.name:34} {release.files:3} files {release.lines:5} lines  {release.request}")
            return 0
        if arguments.command == "versions":
            print(" ".join(sorted(registry.sdists(arguments.package))))
            return 0
        with open_sandboxes(arguments.directory) as sandboxes:
            return {"mine": mine_one, "build": build_all, "check": check_all}[arguments.command](arguments, registry, sandboxes)
    except (TaskError, SandboxError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


def mine_one(arguments, registry: Registry, sandboxes: Sandboxes) -> int:
    for what, name in (("package", arguments.package), ("old", arguments.old), ("new", arguments.new)):
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9.!+_-]*", name):
            raise TaskError(f"{what}: expected the name of a package or a version, got {name!r}")
    target = arguments.directory / "mined" / f"{arguments.package}-{arguments.old}-{arguments.new}.json"
    if not target.exists():
        release, task, log = mine(
            Release(arguments.package, arguments.old, arguments.new, pypi=tuple(arguments.pypi)), registry, sandboxes
        )
        target.parent.mkdir(parents=True, exist_ok=True)
        found = {
            "release": asdict(release),
            "change_log": log,
            "fail_to_pass": task.verifier.fail_to_pass,
            "pass_to_pass": task.verifier.pass_to_pass,
        }
        target.write_text(json.dumps(found, indent=1))
    found = json.loads(target.read_text())
    release = Release(**found["release"])
    print(f"{release.name}: {release.files} files, {release.lines} lines, {release.counts} tests, {len(release.exclude)} flaky")
    return 0


def built(release: Release, arguments, registry: Registry, sandboxes: Sandboxes) -> Task:
    """A task of the catalogue, kept as a directory from the first time on."""
    place = arguments.directory / "built" / f"{release.name}-{release.lists[:8]}"
    with suppress(TaskError):
        return replace(load(place), instruction=release.request)
    task = build(release, registry, sandboxes)
    save(task, place)
    return task


def build_all(arguments, registry: Registry, sandboxes: Sandboxes) -> int:
    if unknown := {*arguments.names} - {release.name for release in catalogue()}:
        raise TaskError(f"expected names of the catalogue, got {', '.join(sorted(unknown))}")
    for release in catalogue():
        if not arguments.names or release.name in arguments.names:
            built(release, arguments, registry, sandboxes)
            print(f"{arguments.directory / 'built' / release.name}-{release.lists[:8]}", flush=True)
    return 0


def check_all(arguments, registry: Registry, sandboxes: Sandboxes) -> int:
    if arguments.times < 1:
        raise TaskError(f"--times: expected at least 1, got {arguments.times}")
    places = [name for name in arguments.names if Path(name, "task.toml").exists()]
    releases = [r for r in catalogue() if r.name in arguments.names or not arguments.names]
    if unknown := {*arguments.names} - {*places} - {r.name for r in releases}:
        raise TaskError(f"expected names of the catalogue or task directories, got {', '.join(sorted(unknown))}")
    sound = True
    for make in [*(lambda r=r: built(r, arguments, registry, sandboxes) for r in releases), *(lambda p=p: load(p) for p in places)]:
        found = check(make(), sandboxes, arguments.times)
        sound = sound and found.sound
        print(found, flush=True)
    return 0 if sound else 1
