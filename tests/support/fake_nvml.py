"""NVML of a machine with two GPUs, of which the second has no power meter."""

UUIDS = ("aaaa-1111", "bbbb-2222")


class FakeError(Exception):
    pass


class FakeNvml:
    """The functions of pynvml that are used. A GPU's handle is its number. Both GPUs are at 1,500 MHz."""

    NVMLError = FakeError
    NVML_CLOCK_SM, NVML_TEMPERATURE_GPU = 1, 0

    def __init__(self):
        self.clock = 1500
        self.reasons = 0b101  # idle, which is no throttling, and at the power limit

    def nvmlInit(self):
        pass

    def nvmlDeviceGetHandleByUUID(self, uuid):
        if uuid.removeprefix("GPU-") not in UUIDS:
            raise FakeError(f"Not Found: {uuid}")
        return UUIDS.index(uuid.removeprefix("GPU-"))

    def nvmlDeviceGetUUID(self, gpu):
        return f"GPU-{UUIDS[gpu]}"

    def nvmlDeviceGetClockInfo(self, gpu, kind):
        assert kind == self.NVML_CLOCK_SM
        return self.clock

    def nvmlDeviceGetPowerUsage(self, gpu):
        if gpu == 1:
            raise FakeError("Not Supported")
        return 700_500  # mW

    def nvmlDeviceGetTemperature(self, gpu, sensor):
        assert sensor == self.NVML_TEMPERATURE_GPU
        return 60 + 2 * gpu

    def nvmlDeviceGetCurrentClocksEventReasons(self, gpu):
        return self.reasons

    def nvmlDeviceGetEnforcedPowerLimit(self, gpu):
        return 700_000

    def nvmlDeviceGetMaxClockInfo(self, gpu, kind):
        return 1980
