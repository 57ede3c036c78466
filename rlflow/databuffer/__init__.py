"""The data plane: rows, where they lie, and the exchange of values between layouts."""
