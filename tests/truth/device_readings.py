"""Headers and events of sampled devices."""

from truth.rows import event_row


def sampler(name="actor_0", host="one", *, devices=1, interval_s=1.0, run="made"):
    """Return the row of a process that samples so many devices of its host."""
    facts = [
        {
            "device": number,
            "uuid": f"GPU-{number}",
            "bus_id": f"0000:{number:02x}:00.0",
            "model": "Fake",
            "total_bytes": 1000,
            "power_limit_w": 700,
        }
        for number in range(devices)
    ]
    sampling = {"library": "pynvml", "interval_s": interval_s, "devices": facts}
    return process(name, host, run=run, device_sampling=sampling)


def process(name, host="one", *, run="made", **header):
    """Return the row of a process with these keys in its header."""
    role, _, rank = name.rpartition("_")
    return {
        "run": run,
        "name": name,
        "role": role,
        "rank": int(rank),
        "host": host,
        "header": header,
    }


def reading(at_us, utilization, *, device=0, name="actor_0", step=1, run="made", **fields):
    """Return a device's reading."""
    extra = {"device": device, "utilization": utilization, **fields}
    return event_row(name, "device", None, at_us, step=step, run=run, **extra)
