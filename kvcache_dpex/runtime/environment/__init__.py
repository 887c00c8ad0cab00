"""Where the process runs: libraries that pip installed, devices, and which releases go together."""
