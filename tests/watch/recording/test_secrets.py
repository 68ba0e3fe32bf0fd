"""Secrets in commands and variables. The cases were written before the code, from the forms that public tools know:
detect-secrets (keyword.py, basic_auth.py), gitleaks (curl-auth-header, curl-auth-user, generic-api-key, the prefixes of
providers), Sentry's denylist, and the manuals of curl, mysql, psql, docker, openssl and sshpass."""

import json

import pytest

from stoker_watch.recording.telemetry.environment import describe
from stoker_watch.secrets import mask_argv, mask_secrets

S = "hunter2Xk9"
"""The secret of all cases. It must not be left, and neither may any part of it."""

COMMANDS = [
    ["env", f"WANDB_API_KEY={S}", "python", "train.py"],
    ["env", f"AWS_SECRET_ACCESS_KEY={S}", f"AWS_SESSION_TOKEN={S}", "python", "train.py"],
    ["env", f"PGPASSWORD={S}", "psql"],
    ["env", f"MYSQL_PWD={S}", "mysql"],
    ["env", f"SSHPASS={S}", "sshpass", "-e"],
    ["env", f"REDISCLI_AUTH={S}", "x"],
    ["env", f"BORG_PASSPHRASE={S}", "x"],
    ["env", f"GITHUB_PAT={S}", "x"],
    ["env", f"DB_PASS={S} with spaces {S}", "x"],
    ["x", "-p", S],
    ["docker", "login", "-u", "me", "-p", S, "registry"],
    ["mysql", f"-p{S}"],
    ["sshpass", f"-p{S}", "ssh", "host"],
    ["sh", "-c", f"x -p{S} -v"],
    ["x", f"-p{S}"],
    ["x", f"-pHunter2Xk9{S}"],
    ["x", "-k", S],
    ["bash", "-c", f"curl -k https://host; x -k {S}"],
    ["x", "--pat", S],
    ["x", f"--pat={S}"],
    ["x", "--otp", S],
    ["x", f"--otp={S}"],
    ["x", "--mfa-otp", S],
    ["x", "--pin", S],
    ["x", f"--pin={S}"],
    ["x", "--session", S],
    ["x", f"--session={S}"],
    ["x", f"https://host/x?session={S}"],
    ["x", "--pass", S],
    ["x", f"--pass={S}"],
    ["x", "--pw", S],
    ["x", "--pwd", S],
    ["x", "-pw", S],
    ["x", "--passwd", S],
    ["x", "--password", S],
    ["x", f"--password={S} {S}"],
    ["x", "--passphrase", S],
    ["x", "--db-password", S],
    ["x", "--db.password", S],
    ["x", f"db.password={S}"],
    ["x", f"+trainer.logger.api_key={S}"],
    ["x", "--accesskey", S],
    ["x", "--access-key", S],
    ["x", "--accessKey", S],
    ["x", "--secret-key", S],
    ["x", "--secretkey", S],
    ["x", "--private-key", S],
    ["x", "--apikey", S],
    ["x", "--api-key", S],
    ["x", "--api_key", S],
    ["x", "--token", S],
    ["x", "--hf_token", S],
    ["x", "--auth-token", S],
    ["x", "--credentials", S],
    ["x", "--cookie", f"session={S}"],
    ["x", "--client-secret", S],
    ["openssl", "enc", "-pass", f"pass:{S}"],
    ["openssl", "rsa", "-passin", f"pass:{S}"],
    ["curl", "-u", f"me:{S}", "https://host"],
    ["curl", f"-ume:{S}", "https://host"],
    ["curl", "--user", f"me:{S}", "https://host"],
    ["curl", "--proxy-user", f"me:{S}", "https://host"],
    ["curl", "-H", f"Authorization: Bearer {S}", "https://host"],
    ["curl", "-H", f"Authorization: Basic {S}=="],
    ["curl", "-H", f"authorization: token {S}"],
    ["curl", "-H", f"Proxy-Authorization: {S}"],
    ["curl", "-H", f"X-Api-Key: {S}"],
    ["curl", "-H", f"PRIVATE-TOKEN: {S}"],
    ["curl", "-H", f"Cookie: a=1; session={S}"],
    ["curl", f"--header=X-Auth-Token:{S}"],
    ["x", f"Bearer {S}"],
    ["x", f"bearer {S}"],
    ["x", f"https://me:{S}@host/path"],
    ["x", f"postgresql+psycopg://me:{S}@host:5432/db"],
    ["x", f"https://{S}@github.com/me/private.git"],
    ["x", f"redis://:{S}@host:6379/0"],
    ["x", f"postgres://me:p@ss{S}@host/db"],
    ["x", f"me:{S}@tcp(host:3306)/db"],
    ["x", f"https://s3.amazonaws.com/b/k?X-Amz-Credential={S}&X-Amz-Signature={S}&X-Amz-Security-Token={S}"],
    ["x", f"https://storage.googleapis.com/b/k?X-Goog-Signature={S}&X-Goog-Credential={S}"],
    ["x", f"https://b.s3.amazonaws.com/k?AWSAccessKeyId={S}&Signature={S}&Expires=1"],
    ["x", f"https://a.blob.core.windows.net/c/b?sv=1&sig={S}"],
    ["x", f"https://host/x?access_token={S}#id_token={S}"],
    ["x", f"https://host/x?api_key={S}"],
    ["x", f"https://hooks.slack.com/services/{S}/B/{S}"],
    ["x", f"https://discord.com/api/webhooks/1/{S}"],
    ["x", f"https://api.telegram.org/bot123456:{S}/sendMessage"],
    ["x", f"host=db user=me password={S} dbname=x"],
    ["x", f"host=db;user=me;pwd={S};"],
    ["x", f"DefaultEndpointsProtocol=https;AccountName=a;AccountKey={S}==;EndpointSuffix=core.windows.net"],
    ["x", f"Endpoint=sb://h/;SharedAccessKeyName=n;SharedAccessKey={S}="],
    ["x", f'{{"password": "{S}", "lr": 1}}'],
    ["x", f"{{'token':'{S}'}}"],
    ["x", '{\\"api_key\\": \\"' + S + '\\"}'],
    ["x", f"password: {S}"],
    ["x", f"password := {S}"],
    ["bash", "-c", f"export API_TOKEN={S}; python train.py"],
    ["bash", "-c", f"python train.py --password {S} --lr 3"],
    ["bash", "-c", f"python train.py --password '{S} {S}' --lr 3"],
    ["bash", "-c", f"mysql -u root -p{S} -e 'select 1'"],
    ["bash", "-c", f"echo $X | docker login -p {S}"],
    ["stoker", "train", "demo", "--alert-command", f"curl -u me:{S} https://host/alert"],
    ["stoker", "train", "demo", "--alert-command", f"curl -H 'Authorization: Bearer {S}' https://host/alert"],
    ["stoker", "train", "demo", "--alert-command", f"TOKEN={S} notify --to me"],
    ["stoker", "train", "demo", f"--alert-command=notify --pass {S} --to me"],
    ["stoker", "train", "demo", "--alert-webhook", f"https://chat/{S}"],
]

SHAPES = [
    "ghp_" + "a1B2" * 9,
    "github_pat_" + "a1B2" * 12,
    "glpat-" + "a1B2" * 5,
    "hf_" + "aBcD" * 9,
    "xoxb-123456789012-abcdefABCDEF",
    "AKIA" + "ABCD2345" * 2,
    "AIza" + "a1B2c" * 7,
    "ya29." + "a1B2" * 8,
    "sk-" + "a1B2" * 12,
    "sk-ant-api03-" + "a1B2" * 12,
    "sk_live_" + "a1B2" * 6,
    "SG." + "a1B2" * 6 + "." + "a1B2" * 10,
    "npm_" + "a1B2" * 9,
    "pypi-AgEIcHlwaS5vcmc" + "a1B2" * 12,
    "dop_v1_" + "a1b2" * 16,
    "dapi" + "a1b2" * 8,
    "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxIn0.c2lnbmF0dXJl",
    "-----BEGIN RSA PRIVATE KEY-----\nabcdef\n-----END RSA PRIVATE KEY-----",
]
"""Secrets that show by themselves what they are, wherever they stand. Assembled, so that no scanner objects."""

PLAIN = [
    "python train.py --lr 0.01 --batch-size 8 --epochs 3",
    "python train.py --tokenizer bert --max-tokens 5 --keypoints 17 --sort-keys",
    "python train.py --bypass-cache --compass --passes 2 --author me --num-pass 3",
    "python -m torch.distributed.run --nproc-per-node 8 train.py",
    "python train.py model.backbone=resnet50 trainer.max_epochs=3 data.path=/data/cars",
    "stoker train gs://bucket/data --run-dir s3://bucket/runs/1 --weights imagenet",
    "stoker train https://store/x.zip?part=2&version=3",
    "stoker watch -- python -u train.py --image-size 640 640",
    "python train.py --monitor val/loss:min --pin-memory --key-frames 3",
    "env PWD=/work/main OLDPWD=/home/me PATH=/usr/bin:/bin python train.py",
    "rsync me@host:/data/runs@2 a@b.c",
    "python -m pytest -q -k test_resume_2 tests",
    "curl -k https://host/x",
    "kubectl apply -k overlays/gpu",
    "python train.py -k 5 -port=80 -patience 5 -pretrained -p1234:80 -p/data -p./data",
    "find . -print0 -path x -perm 0644",
    "python train.py --pin-memory --pin_memory=1 --pinned --session-dir /x --patch 16 --path /x --option 3 --spin 2",
    "botocore.exceptions.NoCredentialsError: Unable to locate credentials",
    "pin: 4, session: train, session ended; pat on the back; opt=3 top-k 5",
    "python train.py --resume https://host:8080/x --device cuda:0 --time 12:30",
]


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_no_secret_of_a_command_is_left(command: list[str]) -> None:
    shown = mask_argv(command)
    assert len(shown) == len(command)
    assert not any(part in " ".join(shown) for part in (S, S[:5], S[5:])), shown
    assert "***" in " ".join(shown)
    assert shown[0] == command[0]


@pytest.mark.parametrize("secret", SHAPES, ids=lambda secret: secret[:8])
def test_secrets_are_known_by_their_form(secret: str) -> None:
    for text in (secret, f"notify {secret} now", f"--value={secret}"):
        assert secret not in mask_secrets(text)
        assert secret not in mask_argv(["x", text])[1]
    assert mask_secrets(f"notify {secret} now").startswith("notify ***")


@pytest.mark.parametrize("command", PLAIN)
def test_a_command_without_secrets_is_left_as_it_is(command: str) -> None:
    assert mask_argv(command.split()) == command.split()
    assert mask_secrets(command) == command


def test_what_follows_a_secret_is_still_shown() -> None:
    shown = mask_argv(["curl", "-H", f"Authorization: Bearer {S}", "https://host", "--token", S, "--lr", "3"])
    assert shown == ["curl", "-H", "Authorization: ***", "https://host", "--token", "***", "--lr", "3"]
    assert mask_secrets(f"run --pass '{S} {S}' --lr 3") == "run --pass *** --lr 3"
    assert mask_secrets(f"https://host/x?sig={S}&part=2") == "https://host/x?sig=***&part=2"
    assert mask_argv(["x", "--use-auth", "--lr", "3"]) == ["x", "--use-auth", "--lr", "3"]


def test_variables() -> None:
    variables = {
        "NCCL_SOCKET_IFNAME": f"eth0;password={S}",
        "NCCL_NET_PLUGIN": f"=password={S}",
        "TORCH_LOGS": f"Bearer {S}",
        "STOKER_MYTOKEN": S,
        "TORCH_ACCESSKEY": S,
        "CUDA_DB_PASS": S,
        "STOKER_DB_PW": S,
        "STOKER_CACHE_DIR": f"https://host/c?sig={S}",
        "OMP_NUM_THREADS": "4",
    }
    told = describe(variables, ["stoker", f"NCCL_NET={S[:0]}=password={S}"])
    assert S not in json.dumps(told)
    assert set(told["variables"]) == {
        "NCCL_SOCKET_IFNAME", "NCCL_NET_PLUGIN", "TORCH_LOGS", "STOKER_CACHE_DIR", "OMP_NUM_THREADS",
    }  # fmt: skip


@pytest.mark.slow
def test_a_long_command_takes_time_that_is_proportional_to_its_length() -> None:
    for unit in (
        "a-",
        "a=",
        "--a ",
        "-k ",
        "-pa ",
        "-p-",
        "curl -k ",
        "=",
        "'",
        "://",
        "?a",
        "a:b@",
        "-p ",
        "eyJ",
        "x" * 60 + "=",
    ):
        text = unit * (200_000 // len(unit))
        assert len(mask_secrets(text)) > 0
        assert len(mask_argv([text, text])) == 2


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("gs://bucket/data", "gs://bucket/data"),
        ("https://a/b?sv=1&sig=abc%3D&se=2", "https://a/b?sv=1&sig=***&se=2"),
        ("https://hooks.slack.com/services/T1/B2/c", "https://hooks.slack.com/***"),
        ("curl 'https://discord.com/api/webhooks/1/c' -d x", "curl 'https://discord.com/api/webhooks/***' -d x"),
        ("https://me.webhook.office.com/webhookb2/a@b/IncomingWebhook/c", "https://me.webhook.office.com/***"),
        ("https://store/hooks/x.zip", "https://store/hooks/x.zip"),
        ("a@b.c", "a@b.c"),
        ("/data/runs@2", "/data/runs@2"),
    ],
)
def test_only_passwords_are_masked(text: str, shown: str) -> None:
    assert mask_secrets(text) == shown


@pytest.mark.parametrize(
    ("command", "shown"),
    [
        ("--alert-webhook https://chat/a --alert x", "--alert-webhook *** --alert x"),
        ("--hf_token=a --api-key b -password c", "--hf_token=*** --api-key *** -password ***"),
        ("--tokenizer bert --max-tokens 5 --keypoints 17", "--tokenizer bert --max-tokens 5 --keypoints 17"),
        ("--use-auth --lr 3", "--use-auth --lr 3"),
    ],
)
def test_what_stands_behind_a_secret_flag_is_masked(command: str, shown: str) -> None:
    assert " ".join(mask_argv(command.split())) == shown
