"""What concerns the process and the machine: devices, environment, start, status, supervision."""
