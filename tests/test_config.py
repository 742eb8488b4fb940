"""faser.yaml's keys: what they mean, and one sentence for what is refused."""

import pytest

from faser_trtllm.config import load_service_config
from faser_trtllm.errors import ConfigError


@pytest.mark.parametrize(("value", "steps"), [(None, 1), ("auto", 1), (1, 1), (8, 8)])
def test_steps_per_response(value, steps):
    config = load_service_config(None, {"stream_interval": value})
    assert config.steps_per_response == steps
    assert config.stream_interval == (value or "auto")


@pytest.mark.parametrize("value", [0, -3, 1.5, True, "often", "8", [1]])
def test_a_stream_interval_that_is_no_number_of_steps_is_refused(value):
    with pytest.raises(ConfigError) as caught:
        load_service_config(None, {"stream_interval": value})
    message = str(caught.value)
    assert message.startswith(f"configuration key stream_interval is {value!r}: ")
    assert message.endswith("it must be auto or a number of steps, 1 or more")


TIMES = ["startup_timeout_s", "drain_timeout_s", "restart_backoff_s", "restart_backoff_max_s", "health_timeout_s"]
TIMES += ["hang_timeout_s", "draft_timeout_ms", "cancellation_check_period_ms"]


@pytest.mark.parametrize("name", TIMES)
def test_a_time_is_at_most_a_year(name, tmp_path):
    """`faser serve` hands the configuration on as JSON, which says null for infinity."""
    year = 31_536_000 * (1000 if name.endswith("_ms") else 1)
    path = tmp_path / "faser.yaml"
    path.write_text(f"{name}: {year}\n")
    path.write_text(load_service_config(path).model_dump_json())
    assert getattr(load_service_config(path), name) == year
    for value in (".inf", f"{year + 1}"):
        path.write_text(f"{name}: {value}\n")
        with pytest.raises(ConfigError) as caught:
            load_service_config(path)
        shown = value.removeprefix(".")
        assert str(caught.value).startswith(f"configuration key {name} is {shown}")


BOMB = "a0: &a0 [x]\n" + "".join(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 30))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (BOMB + "max_batch_size: *a29\n", "configuration key max_batch_size is [[["),
        ("max_batch_size: !!int ''\n", "is not valid YAML"),
        ("max_batch_size: !!timestamp x\n", "is not valid YAML"),
        ("max_batch_size: !!bool x\n", "is not valid YAML"),
        ("[" * 100_000, "is not valid YAML"),
        ("# " + "x" * (128 << 10), "has more than 131072 bytes"),
        (b"\xff\xfe\x00", "is not valid YAML"),
        ("speculation: off\nnum_threads: [1\n", "is not valid YAML: expected ',' or ']', but got"),
        ("speculation: off\nnum_threads: [1\n", ", on line 3"),
        (
            "num_threads: 1\nspeculation: off\nnum_threads: 2\n",
            "is not valid YAML: it has 'num_threads' on line 1 and again on line 3",
        ),
        ("kv_cache_config:\n  max_tokens: 1\n  max_tokens: 2\n", "it has 'max_tokens' on line 2 and again on line 3"),
        ("drafters: nobody\n", "configuration key drafters is 'nobody': it must be a list of model and suffix"),
        (
            "scheduler_config:\n  capacity_scheduler_policy: x\n",
            "is 'x': input should be 'GUARANTEED_NO_EVICT' or 'MAX_UTILIZATION'",
        ),
    ],
)
def test_a_file_that_is_no_configuration_gets_a_sentence(text, message, tmp_path):
    path = tmp_path / "faser.yaml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ConfigError) as caught:
        load_service_config(path)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 500
