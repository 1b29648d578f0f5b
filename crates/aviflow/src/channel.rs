//! The client's end of a channel into a running job, and terminals on it.

mod terminal;

pub use terminal::{has_terminal, terminal};

use crate::client::{Client, lost};
use crate::error::{Failure, PLATFORM, Result};
use aviflow_api::rest::{ChannelFrame, ChannelInput, OpenChannel, TerminalSize};
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, SyncSender, channel, sync_channel};
use std::time::Duration;

/// Between two signs of life.
const ALIVE: Duration = Duration::from_secs(15);
/// Things that wait to be sent, or to be taken.
const WAITING: usize = 8;
/// Bytes that are sent at once.
const BYTES: usize = 128 << 10;

/// What is put into a channel.
#[derive(Debug)]
pub enum Put {
    /// Bytes.
    Data(Vec<u8>),
    /// There will be no more of them.
    End,
    /// The terminal has another size.
    Size(TerminalSize),
}

/// What comes out of it.
#[derive(Debug)]
pub enum Out {
    /// Bytes.
    Data(Vec<u8>),
    /// There will be no more of them.
    End,
    /// It has ended, a command with this code.
    Exit(i32),
}

/// An open channel. Dropping it closes it.
pub struct Channel {
    /// What is put in waits here until the worker has room.
    pub input: SyncSender<Put>,
    frames: Receiver<Result<ChannelFrame>>,
    close: Option<Box<dyn FnOnce() + Send>>,
    /// Ends the signs of life.
    _alive: Sender<()>,
}

impl Channel {
    /// Opens a channel, and waits until it is open.
    pub fn open(client: &Client, job: &str, asked: &OpenChannel) -> Result<Channel> {
        let mut lines = client.open_channel(job, asked)?;
        let id = loop {
            match lines.next().ok_or_else(|| lost("it ended before the channel was open"))?? {
                ChannelFrame::Opened { channel } => break channel,
                ChannelFrame::Failed { reason } => return Err(Failure::new(reason)),
                ChannelFrame::Alive => {}
                ChannelFrame::Data { .. } | ChannelFrame::End | ChannelFrame::Exit { .. } => {
                    return Err(lost("it began in the middle"));
                }
            }
        };
        let (to, frames) = sync_channel(WAITING);
        let (input, puts) = sync_channel(WAITING);
        let (_alive, ends) = channel();
        let put = {
            let (client, job, to) = (client.clone(), job.to_owned(), to.clone());
            move |input: &ChannelInput| match client.put_channel(&job, &id, input) {
                Ok(()) => true,
                // What ended says how by itself.
                Err(failure) => {
                    if failure.code == PLATFORM {
                        let _ = to.try_send(Err(failure));
                    }
                    false
                }
            }
        };
        let (sign, closing) = (put.clone(), put.clone());
        std::thread::spawn(move || {
            while ends.recv_timeout(ALIVE) == Err(RecvTimeoutError::Timeout) && sign(&ChannelInput::default()) {}
        });
        std::thread::spawn(move || send(&puts, put));
        std::thread::spawn(move || {
            for frame in lines {
                let broken = frame.is_err();
                if to.send(frame).is_err() || broken {
                    return;
                }
            }
        });
        let close = Box::new(move || {
            let _ = closing(&ChannelInput { close: true, ..ChannelInput::default() });
        });
        Ok(Channel { input, frames, close: Some(close), _alive })
    }

    /// What comes out next; after `Exit`, nothing does.
    pub fn next(&mut self) -> Result<Out> {
        loop {
            let frame = self.frames.recv().map_err(|_| lost("it ended before the channel"))?;
            return Ok(match frame? {
                ChannelFrame::Alive | ChannelFrame::Opened { .. } => continue,
                ChannelFrame::End => Out::End,
                ChannelFrame::Data { data } => Out::Data(
                    STANDARD.decode(data).map_err(|e| Failure::platform(format!("output came damaged: {e}")))?,
                ),
                ChannelFrame::Exit { code } => {
                    self.close = None;
                    Out::Exit(code)
                }
                ChannelFrame::Failed { reason } => {
                    self.close = None;
                    return Err(Failure::new(reason));
                }
            });
        }
    }
}

impl Drop for Channel {
    fn drop(&mut self) {
        if let Some(close) = self.close.take() {
            // A control plane that does not answer must not hold this up.
            std::thread::spawn(close);
        }
    }
}

/// Sends what is put in, one after the other; what waits goes together.
fn send(puts: &Receiver<Put>, put: impl Fn(&ChannelInput) -> bool) {
    let mut next = puts.recv().ok();
    while let Some(one) = next.take() {
        let input = match one {
            Put::End => ChannelInput { end: true, ..ChannelInput::default() },
            Put::Size(size) => ChannelInput { size: Some(size), ..ChannelInput::default() },
            Put::Data(mut bytes) => {
                while bytes.len() < BYTES {
                    match puts.try_recv() {
                        Ok(Put::Data(more)) => bytes.extend(more),
                        Ok(other) => {
                            next = Some(other);
                            break;
                        }
                        Err(_) => break,
                    }
                }
                ChannelInput { data: STANDARD.encode(bytes), ..ChannelInput::default() }
            }
        };
        if !put(&input) {
            return;
        }
        next = next.or_else(|| puts.recv().ok());
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::cell::RefCell;

    #[test]
    fn what_waits_is_sent_together_and_in_order() {
        let (input, puts) = sync_channel(WAITING);
        let size = TerminalSize { columns: 80, rows: 24 };
        for put in [Put::Data(b"a".into()), Put::Data(b"b".into()), Put::Size(size), Put::Data(b"c".into()), Put::End] {
            input.send(put).expect("room");
        }
        drop(input);
        let sent = RefCell::new(Vec::new());
        send(&puts, |input| {
            sent.borrow_mut().push(input.clone());
            true
        });
        let data = |bytes: &str| ChannelInput { data: STANDARD.encode(bytes), ..ChannelInput::default() };
        let size = ChannelInput { size: Some(size), ..ChannelInput::default() };
        let end = ChannelInput { end: true, ..ChannelInput::default() };
        assert_eq!(sent.into_inner(), [data("ab"), size, data("c"), end]);
    }
}
