"""Fuzzes the native code: python -m tests.native.fuzz --work_dir DIR [TARGET...], or scripts/fuzz_native.sh.

With clang's libFuzzer if there is a clang++, else by blind mutations. DIR/TARGET/corpus grows and the next run goes on
with it; DIR/TARGET has inputs that ended the process, and the log of the last run. --keep makes the smallest inputs
that reach all that the corpus reaches the kept ones.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from pathlib import Path

from tests.support.native_build import FUZZ_TARGETS, NativeBuild
from tests.support.native_corpus import pack, unpack

MAX_KEPT = 120
MAX_KEPT_BYTES = 1000


def main() -> int:
    parser = argparse.ArgumentParser(description="Fuzz the native code.")
    parser.add_argument("targets", nargs="*", default=FUZZ_TARGETS)
    parser.add_argument("--seconds", type=int, default=60, help="for each target")
    parser.add_argument("--work_dir", type=Path, required=True)
    parser.add_argument("--keep", action="store_true")
    args = parser.parse_args()
    libfuzzer = NativeBuild("address,undefined,fuzzer-no-link", "clang++", libfuzzer=True)
    build = libfuzzer if not libfuzzer.why_not() else NativeBuild("address,undefined")
    if build is not libfuzzer and args.keep:
        parser.error(f"--keep needs libFuzzer: {libfuzzer.why_not()}")
    failed = []
    for target in args.targets:
        program, folder = build.program(target), args.work_dir.absolute() / target
        corpus = unpack(target, folder / "corpus")
        if args.keep:
            _keep(target, program, corpus)
        elif _fuzz(program, corpus, folder, args.seconds) != 0:
            failed.append(target)
    print(f"{len(failed)} of {len(args.targets)} targets found something: {', '.join(failed) or 'none'}")
    return int(bool(failed))


def _fuzz(program: Path, corpus: Path, folder: Path, seconds: int) -> int:
    options = [f"-max_total_time={seconds}", "-max_len=4096", "-timeout=20", "-rss_limit_mb=3000"]
    with (folder / "log").open("w") as log:
        command = [str(program), *options, f"-artifact_prefix={folder}/", str(corpus)]
        done = subprocess.run(command, stdout=log, stderr=subprocess.STDOUT, cwd=folder, env=_environment())
    if done.returncode != 0:
        print(f"{program.name}: see {folder / 'log'}")
    return done.returncode


def _keep(target: str, program: Path, corpus: Path) -> None:
    merged = corpus.with_name("merged")
    shutil.rmtree(merged, ignore_errors=True)
    merged.mkdir()
    command = [str(program), "-merge=1", f"-max_len={MAX_KEPT_BYTES}", str(merged), str(corpus)]
    subprocess.run(command, check=True, capture_output=True, cwd=merged.parent, env=_environment())
    for path in sorted(merged.iterdir(), key=lambda path: path.stat().st_size)[MAX_KEPT:]:
        path.unlink()
    pack(target, merged)


def _environment() -> dict[str, str]:
    return os.environ | {"ASAN_OPTIONS": "allocator_may_return_null=1"}


if __name__ == "__main__":
    sys.exit(main())
