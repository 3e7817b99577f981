"""What every training recipe needs: options, a run's record, text, saved runs."""
