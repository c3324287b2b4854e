"""Rules of scheduling, pure and without MLX: the states of a row, and the choices of prompts and victims."""
