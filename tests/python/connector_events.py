# SPDX-License-Identifier: Apache-2.0
"""What an engine with the connector told as events, folded by hand: for connector_process.py."""

import json
import subprocess
from collections import Counter

from inspector import BINARY, look


def events_of(directory: str) -> dict:
    """What this process told: of each request its states, of each type how often, what tiers and memory there are."""
    lines = subprocess.run([BINARY, "events", directory, "--json"], capture_output=True, text=True, check=True).stdout
    events = [json.loads(line) for line in lines.splitlines()]
    ways: dict[str, list] = {}
    for event in events:
        if event["type"] == "slot":
            ways.setdefault(event["request"], []).append((event["from"], event["to"], event["staged_blocks"]))
    [process] = look("console", directory)["processes"]
    return {
        "ways": list(ways.values()),
        "counts": Counter(f"{event['type']} {event.get('to', '')}".strip() for event in events),
        "found": sum(event["host_blocks"] for event in events if event["type"] == "hit"),
        "tiers": {tier["tier"]: tier["cached_blocks"] for tier in process["tiers"]},
        "memory": process["memory"],
        "left": [process["slots"], [sum(way["blocks"].values()) for way in process["transfers"]]],
        "unknown": process["unknown_events"] + process["lost_events"],
        "twice": look("replay", directory, "--host-blocks", 1 << 20),
        "none": look("replay", directory, "--host-blocks", 0),
    }


def published_blocks(directory: str) -> dict:
    """Of host memory and disk: what can be found by the events; what a restart found; whether blocks come and go."""
    lines = subprocess.run([BINARY, "events", directory, "--json"], capture_output=True, text=True, check=True).stdout
    found, recovered, times = {"host": set(), "disk": set()}, 0, {}
    for event in map(json.loads, lines.splitlines()):
        if event["type"] not in ("registered", "dropped"):
            continue
        tier, key = event["from"], (event["key"], event["version_or_group"])
        if event["type"] == "registered" and event["key"].strip("0"):
            assert key not in found[tier], event
            found[tier].add(key)
            times.setdefault((tier, key), []).append(event["time"])
        elif event["type"] == "registered":
            recovered += event["block_or_blocks"]
        elif event["to"] == "cleared":
            found[tier].clear()
        elif key in found[tier]:
            found[tier].remove(key)
        else:
            assert recovered, event  # its key was not told
    [process] = look("console", directory)["processes"]
    return {
        "host": len(found["host"]),
        "disk": len(found["disk"]),
        "recovered": recovered,
        "unknown": process["unknown_events"] + process["lost_events"],
        "most_times": max(map(len, times.values())),
        "thrice_in_a_minute": any(thrice_in_a_minute(each) for each in times.values()),
        "lints": [finding["lint"] for finding in process["lints"]],
    }


def thrice_in_a_minute(times: list[float]) -> bool:
    """Counted from the first, and anew from the first after that minute."""
    while times:
        minute = [time for time in times if time - times[0] <= 60]
        if len(minute) >= 3:
            return True
        times = times[len(minute) :]
    return False


def types_of(directory: str) -> list[str]:
    lines = subprocess.run([BINARY, "events", directory, "--json"], capture_output=True, text=True, check=True).stdout
    return sorted({json.loads(line)["type"] for line in lines.splitlines()})
