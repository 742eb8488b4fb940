"""The checks of commits: messages and file sizes; and that hooks and CI run what constraints.txt pins."""

import importlib.metadata
import re
import subprocess
import sys

import pytest
import yaml

from tests.support.triton_server import ROOT

SCRIPTS = ROOT / "scripts"
HOOKS = {
    hook["id"]: hook for hook in yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"][0]["hooks"]
}
WORKFLOWS = {path.stem: yaml.safe_load(path.read_text()) for path in (ROOT / ".github" / "workflows").glob("*.yml")}
CI = WORKFLOWS["ci"]
GOOD = "scheduler: count paused rows\n\nThey were free, so the budget was passed.\n"


def run(script, *arguments, cwd=ROOT):
    command = [sys.executable, str(SCRIPTS / script), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, cwd=cwd, timeout=60)


def judged(tmp_path, message):
    file = tmp_path / "message"
    file.write_text(message, encoding="utf-8")
    return run("check_commit_message.py", file)


@pytest.mark.parametrize(
    "message",
    [
        GOOD,
        GOOD + "# Please enter the commit message\n",
        "# a template\n\n" + GOOD,
        "s: " + "x" * 69 + "\n\nwhy\n",
        "ops/accept, policy: größer\n\nwhy\n",
        "Merge branch 'main'\n",
        "fixup! scheduler: count paused rows\n",
    ],
)
def test_messages_that_pass(tmp_path, message):
    done = judged(tmp_path, message)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    ("message", "says"),
    [
        ("", "is empty"),
        ("# only a comment\n", "is empty"),
        ("s: " + "x" * 70 + "\n\nwhy\n", "the subject has 73 characters, at most 72 fit"),
        ("Count paused rows\n\nwhy\n", "has no scope"),
        ("scheduler:count\n\nwhy\n", "has no scope"),
        ("scheduler: count\nwhy\n", "the line below the subject is not empty"),
        ("scheduler: count\n", "the body is missing"),
        ("scheduler: count\n\n\n# why\n", "the body is missing"),
        ("scheduler: count\n\n# ------------------------ >8 ------------------------\ndiff\n", "the body is missing"),
    ],
)
def test_messages_that_are_refused(tmp_path, message, says):
    done = judged(tmp_path, message)
    assert done.returncode == 1
    assert says in done.stderr
    assert done.stderr.count("\n") == 1


def test_large_files_are_refused_but_for_the_demo_pair(tmp_path):
    sizes = {"small.bin": 1 << 20, "large.bin": (1 << 20) + 1, "engines/demo/large.bin": 2 << 20}
    for name, size in sizes.items():
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(bytes(size))
    done = run("check_file_sizes.py", *sizes, "removed.bin", cwd=tmp_path)
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1
    assert done.stderr.startswith("large.bin has 1048577 bytes")


@pytest.mark.parametrize("folder", ["docs/results", "docs/figures"])
def test_a_folder_of_results_stays_small(tmp_path, folder):
    files = [f"{folder}/2027-01-01/a.json", f"{folder}/b.png"]
    for name in files:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(bytes(1 << 19))
    assert run("check_file_sizes.py", files[1], cwd=tmp_path).returncode == 0
    (tmp_path / files[0]).write_bytes(bytes((1 << 19) + 1))
    assert run("check_file_sizes.py", "README.md", cwd=tmp_path).returncode == 0
    done = run("check_file_sizes.py", files[1], cwd=tmp_path)
    assert done.returncode == 1
    assert done.stderr.startswith(f"{folder}/ has 1048577 bytes, at most 1048576 are allowed")


def test_the_results_of_this_repository_stay_small():
    tracked = subprocess.run(["git", "ls-files", "docs"], cwd=ROOT, capture_output=True, text=True).stdout.split()
    done = run("check_file_sizes.py", *tracked)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("tool", ["ruff", "mypy", "clang-format"])
def test_the_tools_of_the_hooks_are_those_of_constraints_txt(tool):
    assert any(tool in hook["entry"] for hook in HOOKS.values())
    pinned = re.search(rf"^{tool}==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert pinned, f"constraints.txt does not pin {tool}"
    assert importlib.metadata.version(tool) == pinned[1]


def test_hooks_fetch_nothing():
    assert {hook["language"] for hook in HOOKS.values()} == {"system"}
    assert all("additional_dependencies" not in hook for hook in HOOKS.values())
    for hook in HOOKS.values():
        for script in re.findall(r"scripts/\S+", hook["entry"]):
            assert (ROOT / script).is_file()


def test_ci_runs_what_is_run_at_home():
    """On each Python that the package takes, with actions that cannot change under their name."""
    text = (ROOT / "pyproject.toml").read_text()
    taken = re.findall(r'"Programming Language :: Python :: (3\.\d+)"', text)
    assert CI["jobs"]["test"]["strategy"]["matrix"]["python"] == taken
    commands = [step["run"] for job in CI["jobs"].values() for step in job["steps"] if "run" in step]
    assert "./build.sh test" in commands
    assert any(command.startswith("./build.sh test --all") for command in commands)


@pytest.mark.parametrize("name", sorted(WORKFLOWS))
def test_workflows_use_actions_and_packages_that_cannot_change_under_their_name(name):
    workflow = WORKFLOWS[name]
    assert workflow["permissions"] == {"contents": "read"}, "a job may ask for more"
    steps = [step for job in workflow["jobs"].values() for step in job.get("steps", ())]
    assert all(re.fullmatch(r"[\w/-]+@[0-9a-f]{40}", step["uses"]) for step in steps if "uses" in step)
    installed = [step["run"] for step in steps if "pip install" in step.get("run", "")]
    assert all(re.search(r"install( [\w-]+==[\w.]+)+$", command) for command in installed), installed
    called = [job["uses"] for job in workflow["jobs"].values() if "uses" in job]
    assert all((ROOT / path).is_file() for path in called)
    scripts = [path for step in steps for path in re.findall(r"scripts/\S+", step.get("run", ""))]
    assert all((ROOT / path).is_file() for path in scripts)


LOCKS = {path.stem: path.read_text() for path in (ROOT / "locks").glob("*.txt")}


def pins(text):
    """Versions by canonical name, of a lock or of constraints.txt."""
    found = {}
    for name, version in re.findall(r"^([\w.-]+)==([^\s;]+)", text, re.MULTILINE):
        found.setdefault(re.sub(r"[-_.]+", "-", name).lower(), set()).add(version)
    return found


def test_locks_have_the_versions_of_constraints_txt_and_a_hash_for_each():
    constraints, locked = pins((ROOT / "constraints.txt").read_text()), pins("".join(LOCKS.values()))
    assert {
        name: (versions, locked.get(name)) for name, versions in constraints.items() if locked.get(name) != versions
    } == {}
    assert set(LOCKS) == {"build", "runtime", "tests", "server", "dynamo"}
    for name, text in LOCKS.items():
        for package in re.split(r"\n(?=\S)", text.strip()):
            assert re.search(r"--hash=sha256:[0-9a-f]{64}", package), f"locks/{name}.txt has no hash for {package}"


def test_the_build_is_pinned_to_what_the_lock_has():
    (required,) = re.findall(
        r'^requires = \["scikit-build-core==(.+)"\]$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE
    )
    assert pins(LOCKS["build"])["scikit-build-core"] == {required}
