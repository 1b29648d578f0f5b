//! What people do inside a worker: commands, terminals, connections, and a look at what every process does.

use super::Driver;
use crate::exec;
use crate::machine::Input;
use crate::process;
use crate::protocol::{Channel, ChannelOutput, ExecOutput, files};
use crate::sweep;
use crate::sys::{self, Pid, Poll};
use std::collections::BTreeSet;

impl Driver {
    pub(super) fn exec(&mut self, id: u64, rank: u32, argv: &[String], stdin: &str) {
        let started = (|| {
            let launch = self.launch.as_ref().ok_or("no rank runs here")?;
            if self.commands.contains(id) {
                return Err(format!("command {id} runs already: choose another number"));
            }
            let input =
                sys::memory_file(&exec::decode(stdin)?).map_err(|e| format!("no memory for standard input: {e}"))?;
            process::start(argv, &self.spec.cwd, &self.environment(launch, rank), Some(input))
        })();
        match started {
            Ok(started) => self.commands.add(id, started),
            Err(reason) => self.inputs.push_back(Input::Exec { id, output: ExecOutput::Failed(reason) }),
        }
    }

    pub(super) fn open(&mut self, id: u64, rank: u32, channel: Channel) {
        let inputs = &mut self.inputs;
        let said = |id, output| inputs.push_back(Input::Channel { id, output });
        if self.channels.contains(id) || self.stacks.contains(id) {
            return self.refuse(id, format!("channel {id} is open already: choose another number"));
        }
        match channel {
            Channel::Port { port } => self.channels.add_port(id, port, said),
            Channel::Terminal { argv, size, term } => {
                let Some(launch) = &self.launch else { return self.refuse(id, "no rank runs here".to_owned()) };
                let mut environment = self.environment(launch, rank);
                environment.insert("TERM".into(), term.unwrap_or_else(|| "xterm".to_owned()).into());
                match process::start_on_terminal(&argv, &self.spec.cwd, &environment, size) {
                    Ok((pid, shown)) => {
                        let inputs = &mut self.inputs;
                        let said = |id, output| inputs.push_back(Input::Channel { id, output });
                        self.channels.add_terminal(id, pid, shown, said);
                    }
                    Err(reason) => self.refuse(id, reason),
                }
            }
            Channel::Stacks { rank } => match self.stacks.ask(id, rank) {
                Ok(()) => self.begin_stacks(),
                Err(reason) => self.refuse(id, reason),
            },
        }
    }

    pub(super) fn refuse(&mut self, id: u64, reason: String) {
        self.inputs.push_back(Input::Channel { id, output: ChannelOutput::Failed(reason) });
    }

    fn begin_stacks(&mut self) {
        let visits: BTreeSet<Pid> = self.commands.sessions().chain(self.channels.sessions()).collect();
        let find = move || {
            let mut found = sweep::below(sys::getpid()).0;
            found.retain(|process| !visits.contains(&process.session));
            found
        };
        if let Err((ids, e)) = self.stacks.begin(&self.spec.cwd, self.now().0, find) {
            for id in ids {
                self.refuse(id, format!("the processes here cannot be looked at now: {e}; try again"));
            }
        }
    }

    pub(super) fn tell_stacks(&mut self, poll: &Poll) {
        let (ids, told) = self.stacks.read(poll, self.now().0).unwrap_or_else(|| (Vec::new(), Err(String::new())));
        for id in ids {
            match &told {
                Ok(stacks) => self.channels.add_answer(id, serde_json::to_vec(stacks).unwrap_or_default()),
                Err(reason) => self.refuse(id, reason.clone()),
            }
        }
        self.begin_stacks();
        self.channels.answer(|id, output| self.inputs.push_back(Input::Channel { id, output }));
    }

    /// Says how many terminals are open, for a job that is there for them alone.
    pub(super) fn tell_terminals(&mut self) {
        let open = self.channels.terminals();
        if open != self.terminals {
            let file = self.folder.join(files::TERMINALS);
            let draft = file.with_extension("new");
            // Whoever reads it finds one number or the other.
            let written = std::fs::write(&draft, format!("{open}\n")).and_then(|()| std::fs::rename(&draft, &file));
            // On a full disk it is tried again: the job ends, or goes on, by what stands there.
            if written.is_ok() {
                self.terminals = open;
            }
        }
    }
}
