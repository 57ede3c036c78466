"""The process and the machine: devices, environment, start, status, supervision."""
