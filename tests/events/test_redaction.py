"""Credentials are masked by key, place and shape; what training needs to be read stays."""

import json
import shlex
import string
import time

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from verl_profiler.events.redaction import MASK, is_secret, mask, mask_command, mask_text


def words(text):
    return text.split()


SECRET_KEYS = words(
    "token key secret password passwd pwd credential credentials auth cookie api_key apiKey APIKey "
    "OPENAI_API_KEY HF_TOKEN HUGGING_FACE_HUB_TOKEN WANDB_API_KEY AWS_ACCESS_KEY_ID "
    "AWS_SECRET_ACCESS_KEY +a.b.api_key --token ++logger.wandb.api-key auth_token authToken authtoken "
    "db_password DB_PASS access_token_file hf_tokens Set-Cookie X-Api-Key X-Amz-Signature sig "
    "private_key secrets.anything proxy_auth client_secret token2 my-key user_pw a[0].token session_key"
)
READABLE_KEYS = words(
    "tokenizer max_tokens tokens key_cache monkey keyboard author compass pad_token_id eos_token "
    "bos_token data.prompt_key data.reward_fn_key image_key response_key data_source_key batch_keys "
    "trainer.total_epochs actor_rollout_ref.actor.ppo_max_token_len_per_gpu token_level_loss "
    "tokenizer_path profile_token_start trust_remote_code balance_dp_token RAY_AUTH_MODE PWD "
    "algorithm.use_kl_in_reward enable_thinking_key algorithm.rollout_correction.bypass_mode "
    "time_per_output_token --speculative-token-map --tbo-token-distribution-threshold pass_k num_pass "
    "--bucket-time-to-first-token signal design assignment authority"
)


@pytest.mark.parametrize("key", SECRET_KEYS)
def test_keys_of_credentials_are_recognized(key):
    """In every spelling of Hydra, of flags, of variables and of headers."""
    assert is_secret(key)


@pytest.mark.parametrize("key", READABLE_KEYS)
def test_keys_of_training_stay_readable(key):
    """They hold the same words."""
    assert not is_secret(key)


@pytest.mark.parametrize(
    ("text", "masked"),
    [
        ("https://user:p@ss@host/x", "https://***@host/x"),
        ("http://proxy:pa/ss@host:80/x", "http://***@host:80/x"),
        ("https://ghp@github.com/x", "https://***@github.com/x"),
        ("git+https://github.com/x/y@main", None),
        ("http://host:8080/path@v1", None),
        ("https://user:0000000000/0@host/path", "https://***@host/path"),
        ("tcp://10.0.0.1:6379", None),
        (
            "https://s3/x?X-Amz-Credential=AK%2F1&X-Amz-Signature=abc&part=1",
            "https://s3/x?X-Amz-Credential=***&X-Amz-Signature=***&part=1",
        ),
        ("https://blob/x?sv=2022&sig=abc%3D#top", "https://blob/x?sv=2022&sig=***#top"),
        ("https://hooks.slack.com/services/T0/B0/xyz", "https://hooks.slack.com/***"),
        ("Authorization: Basic dXNlcjpw, then", "Authorization: ***"),
        ("sent Bearer abc.def-1 to it", "sent Bearer *** to it"),
        ("a bearer token, basic functions", None),
        (
            "sh -c 'HF_TOKEN=abc python --token def -x'",
            "sh -c 'HF_TOKEN=*** python --token *** -x'",
        ),
        ('{"api_key": "a\\"b c", "lr": 1}', '{"api_key": "***", "lr": 1}'),
        ('{\\"api_key\\": \\"abc\\"}', '{\\"api_key\\": \\"***\\"}'),
        ("{'token': b'abc'}", "{'token': b'***'}"),
        ("{api_key:abc,lr:1}", "{api_key:***,lr:1}"),
        ("x[0].token=abc", "x[0].token=***"),
        ("password = abc", "password = ***"),
        ("token=null use_auth=True", None),
        ("max_tokens=5, eos_token='<|im_end|>'", None),
        ("KeyError: 'response_mask'", None),
        ("used hf_abcdefghijklmnopqrst0123", "used ***"),
        ("used sk-proj-abcdefghijklmnop0123", "used ***"),
        ("jwt eyJhbGciOiJIUzI1.eyJzdWIiOiIx.abc", "jwt ***"),
        ("-----BEGIN RSA PRIVATE KEY-----\nabc\n-----END RSA PRIVATE KEY-----\nx", "***\nx"),
    ],
)
def test_free_text(text, masked):
    """None: it stays as it is."""
    assert (text if masked is None else masked) == mask_text(text)
    assert mask_text(text) == mask_text(mask_text(text))


def test_a_command_line():
    """Flags with their next word, overrides, environment, scripts."""
    words = ["env", "HF_TOKEN=a b", "python", "+x.api_key=s,t", "--token", "u", "--lr", "1e-6"]
    words += [
        "trainer.logger={wandb:{api_key:v}}",
        "data.prompt_key=prompt",
        "-H",
        "Cookie: a=w; b=x",
    ]

    assert [
        *("env", "HF_TOKEN=***", "python", "+x.api_key=***", "--token", "***", "--lr", "1e-6"),
        *("trainer.logger={wandb:{api_key:***}}", "data.prompt_key=prompt", "-H", "Cookie: ***"),
    ] == mask_command(words)


def test_nested_settings():
    """Whatever lies under the key of a credential; numbers and texts elsewhere stay."""
    value = {
        "environment": {"HF_TOKEN": "abc", "PIN_MEMORY": 1, "PASSWORD": 123},
        "credentials": {"user": "u", "more": ["x", {"deep": "y"}], "on": True},
        "options": [{"env-var": "API_KEY=abc,LR=1"}],
        "max_tokens": 5,
    }

    assert {
        "environment": {"HF_TOKEN": MASK, "PIN_MEMORY": 1, "PASSWORD": MASK},
        "credentials": {"user": MASK, "more": [MASK, {"deep": MASK}], "on": True},
        "options": [{"env-var": "API_KEY=***,LR=1"}],
        "max_tokens": 5,
    } == mask(value)


def test_credentials_that_are_known_by_value_are_masked_everywhere():
    """For example what a shell put in the place of `$HF_TOKEN`."""
    assert ["x", "name=***-1"] == mask_command(["x", "name=abcdefgh-1"], known=["abcdefgh"])


# A `/` after a port-like number begins a path in every URL parser.
SECRETS = st.text(
    string.ascii_letters + string.digits + "_-+/.!$%^*~", min_size=12, max_size=40
).filter(lambda text: text[0].isalpha() and text[-1].isalnum())
KEYS = st.sampled_from([key for key in SECRET_KEYS if "[" not in key])


@given(
    key=KEYS,
    secret=st.text(min_size=1).map(lambda text: f"Zq9{text}9qZ"),
    others=st.lists(st.text()),
)
@example(key="--token", secret="Zq9 =\n{}'\"9qZ", others=["--a", "a='"])
def test_no_secret_of_a_command_line_is_left(key, secret, others):
    """Any text at all, as `key=value` and as the word after a flag."""
    flag = f"--{key.strip('+-')}".replace(".", "-")
    words = [*others, f"{key}={secret}", *others, "x", flag, secret]

    masked = mask_command(words)

    assert len(words) == len(masked)
    assert secret not in json.dumps(masked, ensure_ascii=False)
    assert "9qZ" not in "".join(masked)


@given(key=KEYS, secret=SECRETS)
def test_no_secret_of_free_text_is_left(key, secret):
    """In assignments, JSON, reprs, URLs and scripts."""
    name = key.strip("+-")
    texts = [
        f"cannot reach {name}={secret}",
        f"{name}: {secret}\nnext: line",
        json.dumps({name: secret, "lr": 1}),
        json.dumps(json.dumps({name: secret, "lr": 1})),
        repr({"a": {name: secret}}),
        f"x={{{name}:{secret},lr:1}}",
        f"https://user:{secret}@host/path",
        f"https://host/path?part=1&{name}={secret}#end",
        f"python -m x {shlex.join([f'--{name}', secret])} --lr 1",
        f"Authorization: Bearer {secret}",
    ]
    for text in texts:
        assert secret not in mask_text(text), text


@given(
    text=st.text()
    | st.lists(st.sampled_from(words("token = : -- ' \" \\ a . [ ] ://@ ?&"))).map("".join)
)
def test_any_text_is_masked_without_a_failure(text):
    """Twice is as good as once."""
    mask_text(text)
    mask_command([text, text])
    is_secret(text)


@pytest.mark.parametrize(
    "piece",
    [
        "a",
        "token ",
        "token=",
        "://",
        "://:",
        "a.",
        "-",
        "token:'",
        "a@",
        "\\",
        "?a",
        "bearer ",
        "eyJ",
        " ",
        "[,",
    ],
)
def test_the_time_taken_grows_with_the_length_only(piece):
    """A quadratic search takes 16 times as long for a text of four times the length."""

    def taken(length):
        text = piece * (length // len(piece))
        began = time.process_time()
        mask_text(text)
        return time.process_time() - began

    assert taken(100_000) < 10 * taken(25_000) + 1
