"""One directory, many processes: what every store and router must do, asked for by a client in another process."""
