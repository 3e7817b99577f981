"""What tests take back after each other."""

import logging
import threading

import state


def test_a_lock_of_logging_that_an_interrupt_left_taken_is_free_again():
    def other():
        is_free.append(logging._lock.acquire(blocking=False))
        if is_free[-1]:
            logging._lock.release()

    is_free: list[bool] = []
    logging._lock.acquire()
    logging._lock.acquire()
    for give_back in (lambda: None, state.free_logging):
        give_back()
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
    assert is_free == [False, True]
