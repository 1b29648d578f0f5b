//! What people do inside a worker: commands and channels.

use super::{Machine, Output, Phase};
use crate::protocol::{Channel, ChannelOutput, ExecOutput, FromAgent};

impl Machine {
    pub(super) fn exec(&mut self, id: u64, rank: Option<u32>, argv: Vec<String>, stdin: String, out: &mut Vec<Output>) {
        match self.beside(rank, Some(&argv)) {
            Err(reason) => self.send(FromAgent::Exec { id, output: ExecOutput::Failed(reason) }, out),
            Ok(rank) => out.push(Output::Exec { id, rank, argv, stdin }),
        }
    }

    pub(super) fn open(&mut self, id: u64, rank: Option<u32>, channel: Channel, out: &mut Vec<Output>) {
        let argv = match &channel {
            Channel::Terminal { argv, .. } => Some(argv.as_slice()),
            Channel::Port { .. } | Channel::Stacks { .. } => None,
        };
        match self.beside(rank, argv) {
            Err(reason) => self.send(FromAgent::Channel { id, output: ChannelOutput::Failed(reason) }, out),
            Ok(rank) => out.push(Output::Open { id, rank, channel }),
        }
    }

    /// Whether somebody may look around: beside ranks, or where they failed, as the control plane may keep the GPUs for it.
    fn visited(&self) -> bool {
        match self.phase {
            Phase::Running | Phase::Stopping { .. } => true,
            Phase::Ended => !self.closing && !self.ranks.is_empty(),
            Phase::Idle | Phase::Spawning { .. } | Phase::Clearing { .. } | Phase::Gone => false,
        }
    }

    /// The rank beside which something is to be done, or why it cannot be.
    fn beside(&self, rank: Option<u32>, argv: Option<&[String]>) -> Result<u32, String> {
        let rank = rank.unwrap_or(self.spec.first_rank);
        if argv.is_some_and(<[String]>::is_empty) {
            Err("no command: name a program".to_owned())
        } else if !self.visited() {
            Err("no rank runs here: wait until the job is Running".to_owned())
        } else if !self.ranks.contains_key(&rank) {
            let last = self.spec.first_rank + self.spec.ranks.saturating_sub(1);
            Err(format!("rank {rank} is not here: this worker has {} to {last}", self.spec.first_rank))
        } else {
            Ok(rank)
        }
    }
}
