"""What every training recipe needs: step times, items per second, model FLOPs utilisation, logs."""
