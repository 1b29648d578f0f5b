//! What is said to the control plane first, and what it says.

use super::{Launch, Machine, Output, Phase};
use crate::protocol::{FromAgent, PROTOCOL, ToAgent};

impl Machine {
    pub(super) fn hello(&mut self, port: u16, peer_port: u16, log: (u64, u64), out: &mut Vec<Output>) {
        self.welcomed = false;
        out.push(Output::Send(FromAgent::Hello {
            protocol: PROTOCOL,
            job_id: self.spec.job_id,
            attempt: self.spec.attempt,
            worker: self.spec.worker,
            token: self.spec.token.clone(),
            pid: self.pid,
            epoch: self.epoch,
            host: self.spec.host.clone(),
            port,
            up: self.up,
            log,
            peer_port,
            gpus: self.gpus.clone(),
        }));
    }

    /// Takes what it says.
    pub(super) fn message(&mut self, message: ToAgent, now: u64, out: &mut Vec<Output>) {
        // A refusal is no sign that somebody looks after this worker.
        if !matches!(message, ToAgent::Refused { .. }) {
            self.fence.heard(now);
        }
        match message {
            // It comes with each connection: once in the log is enough.
            ToAgent::Refused { reason } if self.refused.as_ref() == Some(&reason) => {}
            ToAgent::Refused { reason } => {
                out.push(Output::Note(format!("the control plane refuses this agent: {reason}")));
                self.refused = Some(reason);
            }
            ToAgent::Welcome { term, log_have, ping_ms } => self.welcome(term, log_have, ping_ms, now, out),
            ToAgent::Unknown { reason } => {
                self.unknown = true;
                self.closing = true;
                if self.phase == Phase::Ended {
                    // Whoever finds the folder takes over the log that was not shipped.
                    self.exit(false, out);
                } else {
                    self.stop(
                        self.spec.grace_ms,
                        format!("the control plane does not know this attempt: {reason}"),
                        true,
                        now,
                        out,
                    );
                }
            }
            // Nothing else counts before a welcome.
            _ if !self.welcomed => {}
            ToAgent::Start { term, epoch, master_host, master_port, best_step, peers } => {
                if self.fence.at(true).is_some_and(|at| at <= now) {
                    out.push(Output::Note(format!("the word to start epoch {epoch} is old: it must be said again")));
                    out.push(Output::Disconnect);
                    return;
                }
                if term >= self.term {
                    self.fence.add(peers);
                }
                self.start(term, Launch { epoch, master_host, master_port, best_step }, now, out);
            }
            ToAgent::Stop { term, grace_ms, reason, epoch } => {
                // Ranks that were started since are not meant: the word is older than they are.
                let meant = epoch == 0 || epoch >= self.epoch;
                if meant && self.accepts(term, "stop", out) {
                    if self.phase == Phase::Ended && epoch > self.epoch {
                        self.skip(epoch, &reason, now, out);
                    }
                    self.stop(grace_ms, reason, true, now, out);
                }
            }
            ToAgent::Ack { seq } => {
                self.events.acknowledge(seq);
                self.send_events(now, out);
            }
            ToAgent::LogAck { offset } => out.push(Output::LogDurable(offset)),
            ToAgent::Exec { id, rank, argv, stdin } => self.exec(id, rank, argv, stdin, out),
            ToAgent::ExecKill { id } => out.push(Output::ExecKill(id)),
            ToAgent::Open { id, rank, channel } => self.open(id, rank, channel, out),
            ToAgent::Put { id, input } => out.push(Output::Put { id, input }),
            ToAgent::Release => {
                // Never while a process may live: a release says that the end is durable.
                if self.phase == Phase::Ended {
                    self.exit(true, out);
                }
            }
            ToAgent::Ping { n, heard } => {
                self.fence.ping(n, heard, now);
                out.push(Output::Send(FromAgent::Pong { n }));
            }
        }
    }

    pub(super) fn welcome(&mut self, term: u64, log_have: u64, ping_ms: u64, now: u64, out: &mut Vec<Output>) {
        if term < self.term {
            out.push(Output::Disconnect);
            return;
        }
        self.term = term;
        self.welcomed = true;
        self.fence.welcomed(ping_ms);
        out.push(Output::ShipFrom(log_have));
        self.events.again();
        self.send_events(now, out);
        for (rank, (at, epoch, progress)) in std::mem::take(&mut self.unsent) {
            let ago_ms = now.saturating_sub(at);
            out.push(Output::Send(FromAgent::Progress { ago_ms, epoch, rank, progress }));
        }
    }

    /// Whether a command is of the current term; raises it if it is newer.
    pub(super) fn accepts(&mut self, term: u64, what: &str, out: &mut Vec<Output>) -> bool {
        if term < self.term {
            out.push(Output::Note(format!("refused a {what} of term {term}: the term is {}", self.term)));
            return false;
        }
        self.term = term;
        true
    }
}
