# SPDX-License-Identifier: Apache-2.0
"""A real S3 server on this machine: SeaweedFS, with one bucket, for the demo and the tests of what goes to one."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

from ports import free_ports
from suspend import suspend

WEED = Path(__file__).resolve().parents[2] / "build/stores/bin/weed"
BUCKET = "torpor"
STARTED_WITHIN = 300  # seconds; 3 to 14 were seen
_ASK = """
import sys, urllib.error, urllib.request
try:
    print(urllib.request.urlopen(urllib.request.Request(sys.argv[1], method=sys.argv[2]), timeout=10).status)
except urllib.error.HTTPError as answer:
    print(answer.code)
except OSError:
    print(0)
"""


def make_certificate(name: Path, host: str = "127.0.0.1") -> None:
    """NAME.crt and NAME.key, for a server of this machine with this address; it is its own authority."""
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "2",
         "-subj", "/CN=a server of this machine", "-addext", f"subjectAltName=IP:{host}",
         "-keyout", f"{name}.key", "-out", f"{name}.crt"],
        check=True, capture_output=True,
    )  # fmt: skip


class S3Server:
    """Started when it is made; `environment` is what a client needs to reach it. Its files stay under `folder`. With
    `tls`, `encrypted` is the same over TLS: with a certificate of its own and credentials in files. `inside`: words
    before its command, where it has a network of its own, and `host` is its address there (networks.py)."""

    def __init__(self, folder: Path, tls: bool = False, inside: list[str] = (), host: str = "127.0.0.1") -> None:
        self.folder, self._inside, self._host = folder, list(inside), host
        (folder / "data").mkdir(parents=True)
        self._tls = tls
        identity = {"accessKey": "torpor", "secretKey": "of-this-machine-alone"}
        reader = {"accessKey": "reader", "secretKey": "may-only-read"}
        (folder / "identities.json").write_text(
            json.dumps(
                {
                    "identities": [
                        {"name": "torpor", "credentials": [identity], "actions": ["Admin", "Read", "Write", "List"]},
                        {"name": "reader", "credentials": [reader], "actions": ["Read", "List"]},
                    ]
                }
            )
        )
        self._ports = free_ports(5)
        self.environment = {
            "AWS_ENDPOINT_URL": f"http://{host}:{self._ports[3]}",
            "AWS_ACCESS_KEY_ID": identity["accessKey"],
            "AWS_SECRET_ACCESS_KEY": identity["secretKey"],
        }
        self.reader = self.environment | {
            "AWS_ACCESS_KEY_ID": reader["accessKey"],
            "AWS_SECRET_ACCESS_KEY": reader["secretKey"],
        }
        if tls:
            self.encrypted = self._files_for_tls(identity)
        self.start()
        if self._ask(self._ports[2], f"/buckets/{BUCKET}/", "POST") not in (200, 201):
            self.kill()
            raise RuntimeError(f"the S3 server makes no bucket: {folder}/weed.log says why")

    def _files_for_tls(self, identity: dict) -> dict[str, str]:
        make_certificate(self.folder / "server")
        credentials = self.folder / "credentials"
        credentials.touch(mode=0o600)
        credentials.write_text(
            f"[default]\naws_access_key_id = {identity['accessKey']}\naws_secret_access_key = {identity['secretKey']}\n"
        )
        return {
            "AWS_ENDPOINT_URL": f"https://127.0.0.1:{self._ports[4]}",
            "AWS_SHARED_CREDENTIALS_FILE": str(credentials),
            "AWS_CA_BUNDLE": f"{self.folder}/server.crt",
        }

    def start(self) -> None:
        master, volume, filer, s3, https = self._ports
        words = f"""server -dir={self.folder}/data -ip={self._host} -ip.bind={self._host} -master.port={master}
            -volume.port={volume} -filer.port={filer} -s3 -s3.port={s3} -s3.config={self.folder}/identities.json
            -s3.iam=false -s3.port.iceberg=0 -s3.port.lance=0 -master.volumeSizeLimitMB=64 -volume.max=40"""
        if self._tls:
            words += (
                f" -s3.port.https={https} -s3.cert.file={self.folder}/server.crt -s3.key.file={self.folder}/server.key"
            )
        with open(self.folder / "weed.log", "ab") as log:
            self._process = subprocess.Popen(
                [*self._inside, WEED, *words.split()], stdout=log, stderr=log, start_new_session=True
            )
        end = time.monotonic() + STARTED_WITHIN
        while not self._answers():
            if self._process.poll() is not None or time.monotonic() > end:
                self.kill()
                raise RuntimeError(f"the S3 server did not start: {self.folder}/weed.log says why")
            time.sleep(0.1)

    def _answers(self) -> bool:
        """It refuses who does not say who he is; the filer, which makes buckets, answers too; and the master knows a
        volume that can be written: until then each PUT is answered 500."""
        master, _, filer, s3, _ = self._ports
        return (
            self._ask(filer) != 0
            and self._ask(s3) == 403
            and self._ask(master, f"/dir/assign?collection={BUCKET}") == 200
        )

    def _ask(self, port: int, path: str = "/", method: str = "GET") -> int:
        """The status of its answer; 0: it does not answer."""
        url = f"http://{self._host}:{port}{path}"
        if self._inside:
            done = subprocess.run(
                [*self._inside, sys.executable, "-c", _ASK, url, method], capture_output=True, text=True, check=True
            )
            return int(done.stdout)
        try:
            with urllib.request.urlopen(urllib.request.Request(url, method=method), timeout=10) as answer:
                return answer.status
        except urllib.error.HTTPError as answer:
            return answer.code
        except OSError:
            return 0

    @property
    def pid(self) -> int:
        return self._process.pid

    def pause(self) -> None:
        suspend(self._process.pid, group=True)

    def go_on(self) -> None:
        os.killpg(self._process.pid, signal.SIGCONT)

    def kill(self) -> None:
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def __enter__(self) -> S3Server:
        return self

    def __exit__(self, *_) -> None:
        self.kill()
