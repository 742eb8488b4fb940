"""The table of Triton's vulnerabilities, from small documents in the forms of NVIDIA's advisories and of osv.dev."""

import datetime
import json
import re
import subprocess
import sys
import zipfile

import pytest

from scripts import write_cve_table as script
from scripts.write_cve_table import Span, Version, span_of
from tests.support.triton_server import ROOT

LONG_AGO = datetime.date(2026, 1, 31)


def advisory(cve, affected, fixed, *, score=9.8, day=LONG_AGO, product="Triton Inference Server", impacts=""):
    """A CSAF advisory about one vulnerability. affected, fixed: versions in NVIDIA's words; fixed may be None."""
    versions = {"bad": affected} | ({"good": fixed} if fixed is not None else {})
    branches = [
        {"category": "product_version", "name": product, "product": {"product_id": key, "name": text}}
        for key, text in versions.items()
    ]
    family = {"category": "product_name", "name": product, "product": {"product_id": "all", "name": product}}
    return {
        "document": {"csaf_version": "2.0", "tracking": {"id": "5999", "initial_release_date": f"{day}T00:00:00Z"}},
        "product_tree": {"branches": [{"branches": [family]}, {"branches": branches}]},
        "vulnerabilities": [
            {
                "cve": cve,
                "notes": [{"category": "details", "title": "Impacts", "text": impacts}],
                "product_status": {"known_affected": ["bad"]} | ({"fixed": ["good"]} if fixed is not None else {}),
                "release_date": f"{day}T00:00:00.000Z",
                "scores": [{"cvss_v3": {"baseScore": score}, "products": ["bad"]}] if score is not None else [],
            }
        ],
    }


def record(package, events, *, severity="HIGH", day=LONG_AGO, ecosystem="PyPI", **more):
    affected = {
        "package": {"ecosystem": ecosystem, "name": package},
        "ranges": [{"type": "ECOSYSTEM", "events": events}],
    }
    rating = {"database_specific": {"severity": severity}} if severity is not None else {}
    return {"id": "GHSA-x", "published": f"{day}T10:00:00Z", "affected": [affected]} | rating | more


@pytest.mark.parametrize(
    ("words", "within", "without"),
    [
        ("All versions prior to 25.07", ["24.10", "25.06"], ["25.07", "25.08"]),
        ("All versions prior to r26.03", ["26.02"], ["26.03"]),
        ("0.0 - 26.04", ["24.10", "26.04"], ["26.05"]),
        ("0.0-26.05", ["26.05"], ["26.06"]),
        ("0.026.05", ["24.10", "26.05"], ["26.06"]),
        ("v19.11 through v24.08", ["19.11", "24.08"], ["19.10", "24.09"]),
        ("20.10 to 24.03", ["22.01"], ["20.09", "24.04"]),
        ("24.11", ["24.10", "24.11"], ["24.12"]),
        ("All versions", ["1.0", "99.12"], []),
    ],
)
def test_versions_in_nvidia_s_words(words, within, without):
    span = span_of(words)
    assert [text for text in within if Version(text) not in span] == []
    assert [text for text in without if Version(text) in span] == []


def test_spans_of_events_may_be_open_and_several():
    events = [
        {"introduced": "0"},
        {"fixed": "1.5"},
        {"introduced": "2.0"},
        {"last_affected": "2.2"},
        {"introduced": "3"},
    ]
    (item,) = script.osv_vulnerabilities(record("Some_Package", events))
    assert item.product == "some-package"
    found = [text for text in ("1.4", "1.5", "2.0", "2.2", "2.3", "3.0", "9.9") if item.concerns(Version(text))]
    assert found == ["1.4", "2.0", "2.2", "3.0", "9.9"]
    assert Version("1.0") in Span()


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A project of one image, one lock and one document."""
    (tmp_path / "deploy").mkdir()
    (tmp_path / "locks").mkdir()
    (tmp_path / "data").mkdir()
    (tmp_path / "deploy" / "Dockerfile").write_text(
        "ARG TRITON_IMAGE=nvcr.io/nvidia/tritonserver:26.08-py3@sha256:ab\n"
    )
    (tmp_path / "locks" / "runtime.txt").write_text("Some.Package==2.1 \\\n    --hash=sha256:ab\nother==1.0\n")
    (tmp_path / "document.md").write_text(
        "Before.\n\n<!-- vulnerabilities of Triton -->\nold\n<!-- end of vulnerabilities -->\n\nAfter.\n"
    )
    monkeypatch.setattr(script, "DOCUMENT", tmp_path / "document.md")
    monkeypatch.setattr(script, "DOCKERFILE", tmp_path / "deploy" / "Dockerfile")
    monkeypatch.setattr(script, "LOCKS", tmp_path / "locks")
    return tmp_path


def write(folder, *items):
    """Documents, next to files that are none, as a repository has them."""
    folder.mkdir(parents=True, exist_ok=True)
    for number, item in enumerate(items):
        (folder / f"{number}.json").write_text(json.dumps(item))
    (folder / "record.json").write_text('{"dataType": "CVE_RECORD"}')
    (folder / "list.json").write_text("[1]")
    (folder / "README.md").write_text("text")
    return str(folder)


def test_the_table_has_what_is_in_the_development_server_newest_first(project):
    source = write(
        project / "data" / "2026" / "5999",
        advisory(
            "CVE-2026-2", "0.0-26.05", "26.06", day=datetime.date(2026, 8, 18), impacts="code execution, spoofing"
        ),
        advisory("CVE-2025-1", "All versions prior to 25.07", "25.07", score=7.5, impacts="denial of service"),
        advisory("CVE-2025-3", "All versions prior to 25.07", "25.07", score=5),
        advisory("CVE-2024-9", "20.10 to 24.03", "24.04"),
        advisory("CVE-2026-8", "0.0 to v1.3.0 rc14", "v1.3.0 rc15", product="TensorRT-LLM"),
        advisory("CVE-2026-7", "All versions", None, score=None),
    )
    assert script.main(["--csaf", source]) == 0
    lines = (project / "document.md").read_text().splitlines()
    assert lines[0] == "Before."
    assert lines[-1] == "After."
    assert "NVIDIA's advisories up to 2026-08-18:" in lines
    rows = [line for line in lines if line.startswith("|5999")]
    assert rows == [
        "|5999, 2026-08-18|26.06|9.8|2026-2|code execution, spoofing|",
        "|5999, 2026-01-31|none|10|2026-7||",
        "|5999, 2026-01-31|25.07|7.5|2025-1, 2025-3|denial of service|",
    ]


def test_an_archive_is_read_as_a_folder_is(project):
    write(project / "data", advisory("CVE-2025-1", "All versions prior to 25.07", "25.07"))
    with zipfile.ZipFile(project / "data.zip", "w") as archive:
        for path in (project / "data").iterdir():
            archive.write(path, f"main/{path.name}")
    assert script.main(["--csaf", str(project / "data.zip")]) == 0
    assert "2025-1" in (project / "document.md").read_text()


def test_data_without_an_advisory_is_an_error(project, capsys):
    assert script.main(["--csaf", write(project / "data")]) == 2
    assert "has no advisory about Triton Inference Server" in capsys.readouterr().err
    assert "old" in (project / "document.md").read_text()


TODAY = datetime.date.today()


@pytest.mark.parametrize(
    ("item", "status"),
    [
        (advisory("CVE-2026-5", "0.0 - 26.08", "26.09"), 1),
        (advisory("CVE-2026-5", "0.0 - 26.07", "26.08"), 0),
        (advisory("CVE-2026-5", "0.0 - 26.08", "26.09", score=6.9), 0),
        (advisory("CVE-2026-5", "0.0 - 26.08", "26.09", score=None), 1),
        (advisory("CVE-2026-5", "0.0 - 26.08", "26.09", day=TODAY - datetime.timedelta(13)), 0),
        (advisory("CVE-2026-5", "0.0 - 26.08", "26.09", day=TODAY - datetime.timedelta(15)), 1),
        (record("some-package", [{"introduced": "0"}, {"fixed": "2.2"}]), 1),
        (record("some-package", [{"introduced": "0"}, {"fixed": "2.1"}]), 0),
        (record("some-package", [{"introduced": "2.2"}]), 0),
        (record("some-package", [{"introduced": "0"}], severity="MODERATE"), 0),
        (record("some-package", [{"introduced": "0"}], severity=None), 1),
        (record("some-package", [{"introduced": "0"}], ecosystem="npm"), 0),
        (record("some-package", [{"introduced": "0"}], withdrawn="2026-02-01T00:00:00Z"), 0),
        (record("some-package", [{"introduced": "0"}], day=TODAY), 0),
        (record("unused", [{"introduced": "0"}]), 0),
    ],
)
def test_what_is_severe_and_old_and_ours_fails_the_check(project, item, status, capsys):
    csaf = write(project / "csaf", advisory("CVE-2025-1", "All versions prior to 25.07", "25.07"), item)
    before = (project / "document.md").read_text()
    assert script.main(["--csaf", csaf, "--osv", write(project / "osv", item), "--check"]) == status
    assert (project / "document.md").read_text() == before
    captured = capsys.readouterr()
    assert bool(captured.err) == bool(status)
    if status:
        assert re.match(
            r"(CVE-2026-5|GHSA-x) \(.*\) is in (Triton Inference Server 26\.08|some-package 2\.1)\n", captured.out
        )


def test_the_document_has_the_markers_and_the_script_runs_by_its_name(tmp_path):
    document = (ROOT / "docs" / "operate.md").read_text()
    assert len(script.TABLE.findall(document)) == 1
    assert document.count("|bulletin|") == 1
    command = [sys.executable, str(ROOT / "scripts" / "write_cve_table.py"), "--csaf", str(tmp_path), "--check"]
    assert subprocess.run(command, capture_output=True, timeout=60).returncode == 2
