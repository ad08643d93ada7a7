# SPDX-License-Identifier: Apache-2.0
"""torpor push and pull against real S3 servers, which are killed, paused and written to by several at once: SeaweedFS,
and in `tools/dev proof` Ceph's gateway, where that is installed. What the commands of a server say where it refuses a
key."""

import http.server
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

import ceph_server
import pytest
from conftest import ROOT

sys.path.insert(0, str(ROOT / "tools/demo"))
from s3_server import BUCKET, S3Server, make_certificate

TORPOR = ROOT / "build/release/tools/torpor/torpor"
SMALL = ROOT / "tests/golden/v3/g-000002"  # encrypted


@pytest.fixture(scope="module", params=["SeaweedFS", pytest.param("Ceph", marks=pytest.mark.long)])
def server(request, tmp_path_factory):
    of_ceph = request.param == "Ceph"
    if of_ceph and (absent := ceph_server.missing()):
        pytest.skip(f"{absent} is not installed: apt-get install --no-install-recommends ceph-mon ceph-osd radosgw")
    folder = tmp_path_factory.mktemp("s3")
    (folder / "key").touch(mode=0o600)
    (folder / "key").write_bytes(bytes([1] * 32))
    with ceph_server.CephServer(folder) if of_ceph else S3Server(folder, tls=True) as server:
        for environment in (server.environment, server.reader, *([] if of_ceph else [server.encrypted])):
            environment["TORPOR_KEY_FILE"] = str(folder / "key")
        yield server


def start(server, *words, environment=None) -> subprocess.Popen:
    return subprocess.Popen(
        [TORPOR, *map(str, words), "--json"],
        env=os.environ | (environment or server.environment),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def result(process: subprocess.Popen, code: int = 0) -> dict:
    out, problem = process.communicate(timeout=600)
    assert process.returncode == code, problem
    return json.loads(out)


def stored(server) -> int:
    """Return how many bytes of the disk the server uses."""
    return sum(path.stat().st_blocks * 512 for path in server.folder.rglob("*") if path.is_file())


def torpor(server, *words, code: int = 0, environment=None) -> dict:
    return result(start(server, *words, environment=environment), code)


def files(folder: str | Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in Path(folder).iterdir() if path.name not in ("WOKEN", "ASLEEP")}


def test_a_checkpoint_comes_back_as_it_was(server, tmp_path):
    url = f"s3://{BUCKET}/whole"
    assert torpor(server, "ls", url) == {"url": url, "checkpoints": []}
    pushed = torpor(server, "push", SMALL, url)
    assert pushed["moved_bytes"] == pushed["bytes"] == sum(map(len, files(SMALL).values())) and not pushed["was_there"]
    assert torpor(server, "push", SMALL, url)["was_there"]
    listed = torpor(server, "ls", url)["checkpoints"]
    assert [each["name"] for each in listed] == [pushed["name"]] and listed[0]["bytes"] == pushed["bytes"]
    pulled = torpor(server, "pull", f"{url}/{pushed['name']}", tmp_path / "to")
    assert files(pulled["path"]) == files(SMALL)
    assert torpor(server, "verify", pulled["path"])["whole"]


def test_what_is_not_wanted_any_more_goes(server, tmp_path):
    url = f"s3://{BUCKET}/removed"
    name = torpor(server, "push", SMALL, url)["name"]
    assert torpor(server, "gc", url)["removed_parts"] == 0
    assert torpor(server, "rm", f"{url}/{name}", "--dry-run")["dry_run"]
    pulled = torpor(server, "pull", url, tmp_path / "to")
    assert files(pulled["path"]) == files(SMALL)
    assert torpor(server, "rm", f"{url}/{name}")["removed"] == name
    assert torpor(server, "ls", url)["checkpoints"] == []
    would = torpor(server, "gc", url, "--dry-run")
    gone = torpor(server, "gc", url)
    assert would["removed_parts"] == gone["removed_parts"] > 0 and gone["left"] == 0
    assert torpor(server, "gc", url)["removed_parts"] == 0
    assert torpor(server, "push", SMALL, url)["moved_bytes"] == pulled["bytes"]  # nothing of it was left
    assert torpor(server, "rm", f"{url}/{name[:-2]}00", code=3)["error"]["code"] == "not_found"
    assert torpor(server, "rm", url, code=2)["error"]["next_step"].startswith("name one of a store")
    assert torpor(server, "gc", url, "--max-age", "1d", code=2)["error"]["next_step"] == "use --keep"
    assert torpor(server, "gc", url, code=7, environment=server.reader)["error"]["code"] == "unauthenticated"


def test_ls_shows_what_a_user_attached(server, shown, monkeypatch):
    monkeypatch.delitem(server.environment, "TORPOR_KEY_FILE")
    url = f"s3://{BUCKET}/labelled"
    torpor(server, "push", shown["checkpoint"], url)
    [entry] = torpor(server, "ls", url)["checkpoints"]
    assert entry["metadata"] == {"made_by": "tools/dev demo"}
    said = subprocess.run(
        [TORPOR, "ls", url], env=os.environ | server.environment, capture_output=True, text=True, check=True
    ).stdout
    assert "METADATA" in said and "made_by=tools/dev demo" in said


def test_of_several_at_once_one_creates_it(server):
    url = f"s3://{BUCKET}/race"
    results = [result(process) for process in [start(server, "push", SMALL, url) for _ in range(6)]]
    assert [each["was_there"] for each in results].count(False) == 1
    assert len(torpor(server, "ls", url)["checkpoints"]) == 1


def test_what_does_not_fit_is_not_fetched(server, tmp_path):
    url = f"s3://{BUCKET}/fits"
    torpor(server, "push", SMALL, url)
    refused = torpor(server, "pull", url, tmp_path / "to", "--field", "model=another", code=4)
    assert "it does not fit: model is " in refused["error"]["what"] and "another here" in refused["error"]["what"]
    assert [path.name for path in (tmp_path / "to").iterdir()] == ["LOCK"]


def test_who_may_not_is_refused(server):
    url = f"s3://{BUCKET}/whole"
    error = torpor(server, "push", SMALL, f"s3://{BUCKET}/other", code=7, environment=server.reader)["error"]
    assert error["code"] == "unauthenticated" and "AccessDenied" in error["what"]
    wrong = server.environment | {"AWS_SECRET_ACCESS_KEY": "guessed"}
    error = torpor(server, "ls", url, code=7, environment=wrong)["error"]
    assert "SignatureDoesNotMatch" in error["what"] and "guessed" not in json.dumps(error)


def test_where_there_is_no_such_place_it_is_refused_and_not_made(server, tmp_path):
    name = "20261123T071500Z-417b8ce1e9819daf92275e733d38256e"
    for url, code, what in (
        ("s3://no-such-bucket/x", 5, "NoSuchBucket"),
        (f"file://{tmp_path}/typo", 3, f"there is no directory {tmp_path}/typo"),
    ):
        for words in (["ls", url], ["gc", url], ["gc", url, "--dry-run"], ["rm", f"{url}/{name}"],
                      ["pull", url, tmp_path / "to"], ["pull", f"{url}/{name}", tmp_path / "to"]):  # fmt: skip
            assert what in torpor(server, *words, code=code)["error"]["what"]
    assert "make the bucket first" in torpor(server, "gc", "s3://no-such-bucket/x", code=5)["error"]["next_step"]
    assert not any(tmp_path.iterdir())
    assert torpor(server, "push", SMALL, f"file://{tmp_path}/new")["moved_bytes"] > 0


def test_over_tls_with_a_certificate_of_ones_own_and_credentials_in_a_file(server, tmp_path):
    if not hasattr(server, "encrypted"):
        pytest.skip("tried with SeaweedFS")
    url, said = f"s3://{BUCKET}/tls", ""
    pushed = torpor(server, "push", SMALL, url, environment=server.encrypted)
    assert pushed["moved_bytes"] == pushed["bytes"]
    pulled = torpor(server, "pull", url, tmp_path / "to", environment=server.encrypted)
    assert files(pulled["path"]) == files(SMALL)
    make_certificate(tmp_path / "another")
    for authority in ({}, {"AWS_CA_BUNDLE": f"{tmp_path}/another.crt"}, {"AWS_CA_BUNDLE": "/no/such/file"}):
        who = {name: text for name, text in server.encrypted.items() if name != "AWS_CA_BUNDLE"} | authority
        error = torpor(server, "ls", url, code=7, environment=who)["error"]
        assert error["code"] == "unauthenticated" and "AWS_CA_BUNDLE" in error["next_step"]
        said += json.dumps(error)
    plain = server.encrypted | {"AWS_ENDPOINT_URL": server.encrypted["AWS_ENDPOINT_URL"].replace("https", "http")}
    done = start(server, "ls", url, environment=plain)  # a server of TLS does not answer who does not encrypt
    said += "".join(done.communicate(timeout=600))
    assert done.returncode != 0
    Path(server.encrypted["AWS_SHARED_CREDENTIALS_FILE"]).chmod(0o644)
    said += json.dumps(torpor(server, "ls", url, code=2, environment=server.encrypted))
    Path(server.encrypted["AWS_SHARED_CREDENTIALS_FILE"]).chmod(0o600)
    assert "chmod 600" in said and "of-this-machine-alone" not in said + (server.folder / "weed.log").read_text()


def test_whoever_is_killed_it_goes_on(server, shown, tmp_path, monkeypatch):
    """The server in the middle of a push, stopped in the middle of a pull; the client in the middle of both."""
    monkeypatch.delitem(server.environment, "TORPOR_KEY_FILE")
    large, url, target = shown["checkpoint"], f"s3://{BUCKET}/killed", tmp_path / "to"
    before, half = stored(server), sum(map(len, files(large).values())) // 2
    killed = start(server, "push", large, url, "--threads", 1)
    while killed.poll() is None and stored(server) < before + half:
        time.sleep(0.01)
    killed.kill()
    killed.communicate()
    push = start(server, "push", large, url)
    time.sleep(0.1)
    server.kill()
    server.start()
    push.communicate(timeout=600)
    assert push.returncode in (0, 8)  # its own retries may have lasted until the server was back, or not
    pushed = torpor(server, "push", large, url)
    assert pushed["was_there"] or pushed["moved_bytes"] < pushed["bytes"]
    for delay in (0.05, 0.2):
        killed = start(server, "pull", url, target, "--threads", 1)
        time.sleep(delay)
        killed.kill()
        killed.communicate()
    while True:
        pull = start(server, "pull", url, target)
        server.pause()
        if pull.poll() is None:
            break
        server.go_on()  # it had already come to its end
        shutil.rmtree(result(pull)["path"])
    time.sleep(0.5)
    assert pull.poll() is None
    server.go_on()
    assert files(result(pull)["path"]) == files(large)
    assert [path.name for path in target.iterdir() if path.name.startswith("s-")] == []


REFUSALS = {  # as torpor's servers, their older ones, vLLM and a proxy answer
    "/torpor": (401, {"message": "no key (send it so)", "what": "no key", "next_step": "send it so"}, ": no key"),
    "/unguarded": (403, {"message": "start it with an admin key", "code": 403}, ": start it with an admin key"),
    "/vllm": (401, "Unauthorized", ": Unauthorized"),
    "/proxy": (403, None, " refuses the key (403)"),
}


class RefusesKeys(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        status, error, _ = REFUSALS["/" + self.path.split("/")[1]]
        body = b"go away" if error is None else json.dumps({"error": error}).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    do_POST = do_GET

    def log_message(self, *_) -> None:
        pass


@pytest.fixture(scope="module")
def refuses_keys():
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), RefusesKeys) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.mark.parametrize("place", REFUSALS)
@pytest.mark.parametrize(
    ("verb", "next_step"),
    [
        ("switch", "set TORPOR_ADMIN_KEY to the server's admin key"),
        ("sessions", "set TORPOR_ADMIN_KEY to the server's admin key, or TORPOR_API_KEY to a client's key"),
    ],
)
def test_why_a_server_refuses_a_key_is_said_and_which_key_the_command_needs(refuses_keys, place, verb, next_step):
    command = [TORPOR, verb, refuses_keys + place, "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    error = json.loads(done.stdout)["error"]
    assert done.returncode == 7 and error["what"] == refuses_keys + place + REFUSALS[place][2]
    assert error["code"] == "unauthenticated" and error["next_step"] == next_step
