"""The process of sections that ask nothing of a machine: without one, as even that of a dry run imports torch."""

from benchmarks.gpu import section_process

if __name__ == "__main__":
    section_process.open_machine = lambda is_dry: None  # type: ignore[assignment,return-value]
    section_process.main()
