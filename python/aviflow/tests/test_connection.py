import json
import socket
import unittest

from aviflow._connection import (
    EVENTS_KEPT,
    MAX_LINE,
    METRICS_KEPT,
    RECONNECT_SECONDS,
    Connection,
    encode,
)
from fake_agent import FakeAgent


def metrics(step, padding=""):
    return {"type": "metrics", "step": step, "values": {"loss": 1.0}, "padding": padding}


class ConnectionTest(unittest.TestCase):
    def setUp(self):
        self.now = 0.0
        self.agent = FakeAgent()
        self.addCleanup(self.agent.clean)
        self.connection = Connection(self.agent.path, rank=3, clock=lambda: self.now)
        self.addCleanup(self.connection.close)

    def steps(self):
        return [m["step"] for m in self.agent.messages() if m["type"] == "metrics"]

    def drain(self):
        """What arrives when the agent reads as fast as the training sends."""
        data = self.agent.arrived()
        while not self.connection.flush(0):
            data += self.agent.arrived()
        return data + self.agent.arrived()

    def reconnect(self):
        self.now += RECONNECT_SECONDS

    def test_hello_comes_first(self):
        self.connection.send(metrics(1))
        self.agent.accept()
        hello, question, first = self.agent.messages()
        self.assertEqual((hello["type"], hello["rank"]), ("hello", 3))
        self.assertEqual((question["type"], question["id"]), ("stop?", 1))
        self.assertEqual(first["step"], 1)

    def test_no_agent_at_all(self):
        self.agent.die()
        for step in range(METRICS_KEPT * 2):
            self.connection.send(metrics(step))
        self.connection.poll()
        self.assertFalse(self.connection.flush(1.0))
        self.assertFalse(self.connection.stopped)

    def test_an_agent_that_comes_late_gets_the_newest_metrics_and_every_event(self):
        self.agent.die()
        self.connection.send({"type": "facts", "values": {}})
        for step in range(METRICS_KEPT + 5):
            self.connection.send(metrics(step))
        self.agent.start()
        self.reconnect()
        self.connection.poll()
        self.agent.accept()
        messages = [json.loads(line) for line in self.drain().splitlines()][2:]
        self.assertEqual(messages[0]["type"], "facts")
        self.assertEqual([m["step"] for m in messages[1:]], list(range(5, METRICS_KEPT + 5)))

    def test_tries_again_at_most_once_a_second(self):
        self.agent.die()
        self.connection.send(metrics(1))
        self.agent.start()
        self.connection.send(metrics(2))
        self.assertIsNone(self.connection._socket)
        self.reconnect()
        self.connection.send(metrics(3))
        self.agent.accept()
        self.assertEqual(self.steps(), [1, 2, 3])

    def test_agent_dies_in_the_middle(self):
        self.connection.send(metrics(1))
        self.agent.accept()
        self.assertEqual(self.steps(), [1])
        self.agent.die()
        self.connection.send(metrics(2))
        self.connection.poll()
        self.agent.start()
        self.reconnect()
        self.connection.send(metrics(3))
        self.agent.accept()
        self.assertEqual(self.steps(), [2, 3])

    def test_full_buffer_neither_blocks_nor_tears_lines(self):
        padding = "x" * 1000
        last = METRICS_KEPT * 4
        for step in range(last + 1):
            self.connection.send(metrics(step, padding))
        for step in range(EVENTS_KEPT * 2):
            self.connection.send({"type": "checkpoint", "step": step})
        self.assertEqual(len(self.connection._metrics), METRICS_KEPT)
        self.assertEqual(len(self.connection._events), EVENTS_KEPT)
        self.assertFalse(self.connection.flush(0))

        self.agent.accept()
        lines = [line for line in self.drain().splitlines() if b'"metrics"' in line]
        expected = [encode(metrics(step, padding)).strip() for step in range(last + 1)]
        kept = iter(expected)
        self.assertTrue(all(line in kept for line in lines), "lines are whole and in order")
        self.assertEqual(lines[-1], expected[-1])

    def test_a_torn_line_is_sent_again_whole_to_the_next_agent(self):
        self.connection.poll()
        self.connection._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        self.connection.send(metrics(1, "x" * 50_000))
        torn = self.connection._line
        self.assertGreater(self.connection._sent, 0)
        self.agent.accept()
        self.agent.die()
        self.connection.poll()
        self.agent.start()
        self.reconnect()
        self.connection.poll()
        self.agent.accept()
        self.assertEqual(self.agent.arrived().splitlines(keepends=True)[2], torn)

    def test_stop_is_pushed(self):
        self.connection.poll()
        self.agent.accept()
        self.assertFalse(self.connection.stopped)
        self.agent.push('{"stop":true,"rea')
        self.connection.poll()
        self.assertFalse(self.connection.stopped)
        self.agent.push('son":"node drains"}\n')
        self.connection.poll()
        self.assertTrue(self.connection.stopped)
        self.assertEqual(self.connection.stop_reason, "node drains")
        self.agent.die()
        self.connection.poll()
        self.assertTrue(self.connection.stopped)

    def test_answers_that_ask_for_no_stop(self):
        self.connection.poll()
        self.agent.accept()
        for text in (
            '{"id":1,"stop":false,"reason":null}\n',
            "nonsense\n\n[true]\n\xff\n",
            '{"stop":"true"}\n',
            "x" * (MAX_LINE + 10),
            '\n{"later":1}\n',
        ):
            self.agent.push(text)
            for _ in range(3):
                self.connection.poll()
            self.assertFalse(self.connection.stopped, text[:40])
        self.agent.push('{"id":1,"stop":true,"reason":null}\n')
        self.connection.poll()
        self.assertTrue(self.connection.stopped)

    def test_whoever_finds_the_lock_taken_queues_and_goes_on(self):
        with self.connection._lock:
            self.connection.send(metrics(1))
        self.connection.send(metrics(2))
        self.agent.accept()
        self.assertEqual(self.steps(), [1, 2])

    def test_not_finite_numbers_travel_as_text(self):
        line = encode({"type": "metrics", "values": {"a": float("nan"), "b": -float("inf")}})
        self.assertEqual(line, b'{"type":"metrics","values":{"a":"NaN","b":"-Infinity"}}\n')

    def test_a_line_is_at_most_64_kib(self):
        spare = MAX_LINE - len(encode({"type": "facts", "values": {"a": ""}}))
        self.assertEqual(len(encode({"type": "facts", "values": {"a": "x" * spare}})), MAX_LINE)
        with self.assertRaisesRegex(ValueError, "log fewer or shorter values"):
            encode({"type": "facts", "values": {"a": "x" * (spare + 1)}})


if __name__ == "__main__":
    unittest.main()
