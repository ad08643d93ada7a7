# SPDX-License-Identifier: Apache-2.0
"""A real Ceph with its S3 server (RGW) on this machine: one monitor, one OSD in memory, one gateway, one bucket. The
programs are Debian's: apt-get install --no-install-recommends ceph-mon ceph-osd radosgw. Where they are not, missing()
names the first."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
import uuid
from pathlib import Path

from ports import free_ports
from suspend import suspend

BUCKET = "torpor"
STARTED_WITHIN = 180  # seconds; 20 to 60 were seen
_PROGRAMS = ("ceph", "ceph-mon", "ceph-osd", "monmaptool", "radosgw", "radosgw-admin", "curl")
# No cephx: nobody but this machine reaches it, and S3 has keys of its own. Without `crc` the gateway loops for minutes.
_CONFIGURATION = """[global]
fsid = {fsid}
mon_host = [v2:127.0.0.1:{v2},v1:127.0.0.1:{v1}]
auth_cluster_required = none
auth_service_required = none
auth_client_required = none
ms_mon_client_mode = crc
osd_pool_default_size = 1
osd_pool_default_min_size = 1
mon_allow_pool_size_one = true
osd_pool_default_pg_num = 8
osd_pool_default_pg_autoscale_mode = off
osd_crush_chooseleaf_type = 0
osd_objectstore = memstore
memstore_device_bytes = 4294967296
run_dir = {folder}
crash_dir = {folder}
pid_file =
log_file = {folder}/$type.log
mon_cluster_log_file = {folder}/cluster.log
mon_data = {folder}/mon
osd_data = {folder}/osd
[client]
admin_socket =
rgw_data = {folder}/rgw
rgw_frontends = beast endpoint=127.0.0.1:{port}
"""


def missing() -> str | None:
    return next((name for name in _PROGRAMS if shutil.which(name) is None), None)


class CephServer:
    """Started when it is made. As S3Server; the gateway is what is killed and paused."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._below: list[subprocess.Popen] = []
        v2, v1, port = free_ports(3)
        self._url, fsid = f"http://127.0.0.1:{port}", str(uuid.uuid4())
        self._configuration = folder / "ceph.conf"
        for name in ("mon", "osd", "rgw"):
            (folder / name).mkdir(parents=True)
        self._configuration.write_text(
            _CONFIGURATION.format(fsid=fsid, folder=folder, v2=v2, v1=v1, port=port), encoding="utf-8"
        )
        self.environment, self.reader = (
            {"AWS_ENDPOINT_URL": self._url, "AWS_ACCESS_KEY_ID": who, "AWS_SECRET_ACCESS_KEY": secret}
            for who, secret in (("torpor", "of-this-machine-alone"), ("reader", "may-only-read"))
        )
        try:
            self._make_cluster(fsid, f"[v2:127.0.0.1:{v2},v1:127.0.0.1:{v1}]")
            self._make_users()
            self.start()
            self._make_bucket()
        except BaseException:
            self.stop()
            raise

    def _run(self, program: str, *words: str) -> str:
        return subprocess.run(
            [program, "-c", str(self._configuration), *words],
            check=True, capture_output=True, text=True, timeout=STARTED_WITHIN,
        ).stdout  # fmt: skip

    def _began(self, program: str, *words: str) -> subprocess.Popen:
        with open(self.folder / f"{program}.out", "ab") as out:
            return subprocess.Popen(
                [program, "-c", str(self._configuration), "-f", *words], stdout=out, stderr=out, start_new_session=True
            )

    def _make_cluster(self, fsid: str, address: str) -> None:
        monitors, osd = str(self.folder / "monmap"), str(uuid.uuid4())
        subprocess.run(
            ["monmaptool", "--create", "--fsid", fsid, "--addv", "a", address, monitors],
            check=True, capture_output=True,
        )  # fmt: skip
        self._run("ceph-mon", "--mkfs", "-i", "a", "--monmap", monitors)
        self._below.append(self._began("ceph-mon", "-i", "a"))
        self._run("ceph", "osd", "new", osd)
        self._run("ceph-osd", "-i", "0", "--mkfs", "--osd-uuid", osd)
        self._below.append(self._began("ceph-osd", "-i", "0"))

    def _make_users(self) -> None:
        """The reader is the same user with fewer rights, so both see the same buckets."""
        who, reader = self.environment, self.reader
        self._run("radosgw-admin", "user", "create", "--uid", "torpor", "--display-name", "torpor", "--access-key",
                  who["AWS_ACCESS_KEY_ID"], "--secret", who["AWS_SECRET_ACCESS_KEY"])  # fmt: skip
        self._run("radosgw-admin", "subuser", "create", "--uid", "torpor", "--subuser", "torpor:reader", "--key-type",
                  "s3", "--access", "read", "--access-key", reader["AWS_ACCESS_KEY_ID"], "--secret",
                  reader["AWS_SECRET_ACCESS_KEY"])  # fmt: skip

    def _make_bucket(self) -> None:
        user = f"{self.environment['AWS_ACCESS_KEY_ID']}:{self.environment['AWS_SECRET_ACCESS_KEY']}"
        subprocess.run(
            ["curl", "-sS", "--fail", "-X", "PUT", "--aws-sigv4", "aws:amz:us-east-1:s3", "--user", user, "-H",
             "x-amz-content-sha256: UNSIGNED-PAYLOAD", f"{self._url}/{BUCKET}"],
            check=True, capture_output=True,
        )  # fmt: skip

    def start(self) -> None:
        self._gateway = self._began("radosgw", "-n", "client.rgw.a")
        end = time.monotonic() + STARTED_WITHIN
        while self._status() == "000":
            if self._gateway.poll() is not None or time.monotonic() > end:
                self.stop()
                raise RuntimeError(f"the gateway did not start: {self.folder}/radosgw.out says why")
            time.sleep(0.1)

    def _status(self) -> str:
        words = ["curl", "-s", "-m", "10", "-o", "/dev/null", "-w", "%{http_code}", self._url]
        return subprocess.run(words, capture_output=True, text=True).stdout

    def pause(self) -> None:
        suspend(self._gateway.pid, group=True)

    def go_on(self) -> None:
        os.killpg(self._gateway.pid, signal.SIGCONT)

    def kill(self) -> None:
        self._end(self._gateway)

    def stop(self) -> None:
        if hasattr(self, "_gateway"):
            self.kill()
        for process in reversed(self._below):
            self._end(process)

    @staticmethod
    def _end(process: subprocess.Popen) -> None:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()

    def __enter__(self) -> CephServer:
        return self

    def __exit__(self, *_) -> None:
        self.stop()
