import pytest

from forge.redact import is_secret, redact


@pytest.mark.parametrize(
    "key", ["token", "hf_token", "API_KEY", "apiKey", "reward.judge.api-key", "db_password", "client_secret", "HFToken"]
)
def test_keys_that_name_credentials_are_secret(key: str) -> None:
    assert is_secret(key)


@pytest.mark.parametrize(
    "key", ["max_new_tokens", "tokenizer", "tokens_per_second", "eos_token", "token_ids", "key", "monkey", "secretary"]
)
def test_keys_that_only_look_like_credentials_are_not_secret(key: str) -> None:
    assert not is_secret(key)


@pytest.mark.parametrize(
    "text",
    [
        "judge:\n  api_key: hunter2\n",
        "api_key: 'hunter2'  # mine\n",
        "judge: {url: 'http://x', api_key: hunter2, n: 3}\n",
        "overrides:\n  - reward.api_key=hunter2\n  - steps=3\n",
        "store: redis://me:hunter2@host:6379/0\n",
        "password: |\n  hunter2\n  hunter2\nsteps: 3\n",
        "secrets:\n  a: hunter2\n  b:\n  - hunter2\nsteps: 3\n",
        "secrets:\n- hunter2\nsteps: 3\n",
        '"hf_token": "hunter2"\n',
        "headers:\n  Authorization: Bearer hunter2\n",
        "# HF_TOKEN=hunter2\n",
    ],
)
def test_secrets_are_blanked_wherever_they_stand(text: str) -> None:
    clean = redact(text)
    assert "hunter2" not in clean
    assert "<redacted>" in clean
    assert clean.endswith("\n")
    assert ("steps" in text) == ("steps" in clean)


def test_a_config_without_secrets_is_unchanged() -> None:
    text = "# forge 0.1\r\nsampling:\n  max_new_tokens: 256\n  eos_token: </s>\ntoken: null\n\nurl: http://h:80/a@b\n"
    assert redact(text) == text
