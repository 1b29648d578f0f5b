//! Channels into workers ([`aviflow_agent::protocol::channel`]), and what goes through them.

use crate::exec::{ExecError, fits};
use crate::numbered::{LOST, Numbered};
use crate::roster::{Site, Workers};
use aviflow_agent::protocol::ToAgent;
use aviflow_agent::protocol::channel::{CHANNELS, CHUNK, Channel, ChannelInput, ChannelOutput, Size, WINDOW};
use aviflow_engine::telemetry::StreamKey;
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use tokio::sync::{Notify, Semaphore, mpsc};

/// What came out of a channel.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Said {
    /// It is open.
    Opened,
    /// Bytes.
    Data(Vec<u8>),
    /// There will be no more of them.
    End,
    /// It has ended, a command with this code. The last.
    Exit(i32),
    /// It could not be opened, or broke. The last.
    Failed(String),
}

impl<S: Site> Workers<S> {
    /// Opens a channel into a worker, beside a rank (the worker's first if none).
    ///
    /// # Errors
    /// If there is no such worker, its agent is not connected or knows no channels, or the command is too long.
    pub fn open(
        &self,
        key: StreamKey,
        rank: Option<u32>,
        channel: Channel,
    ) -> Result<(ChannelWriter, ChannelReader), ExecError> {
        if let Channel::Terminal { argv, term, .. } = &channel {
            // A message that is too long would cut the worker's connection, and with it all that goes on there.
            fits(argv.iter().chain(term))?;
        }
        let StreamKey { job, attempt, worker } = key;
        let begun = self.with(key, |found| {
            let link = found.link.as_ref().ok_or(ExecError::NotConnected { job, worker })?;
            if link.protocol < CHANNELS {
                return Err(ExecError::TooOld { job, worker });
            }
            let (said, room) = (Arc::<Unread>::default(), Arc::new(Semaphore::new(WINDOW)));
            let sink = Sink::new(said.clone(), room.clone());
            let id = link.channels.begin(sink).ok_or(ExecError::NotConnected { job, worker })?;
            link.send(ToAgent::Open { id, rank, channel });
            let agent = link.sender.downgrade();
            let writer = ChannelWriter { agent: agent.clone(), id, room };
            Ok((writer, ChannelReader { agent, id, channels: link.channels.clone(), said }))
        });
        begun.ok_or(ExecError::NoWorker { job, attempt, worker })?
    }
}

/// Puts something into a channel.
#[derive(Clone)]
pub struct ChannelWriter {
    /// Of no use once the connection has ended, and with it the channel.
    agent: mpsc::WeakUnboundedSender<ToAgent>,
    id: u64,
    /// Bytes that the agent has room for.
    room: Arc<Semaphore>,
}

impl ChannelWriter {
    /// Puts bytes into it as soon as there is room; whether it is still open.
    pub async fn data(&self, bytes: &[u8]) -> bool {
        for chunk in bytes.chunks(CHUNK) {
            let Ok(room) = self.room.acquire_many(chunk.len() as u32).await else { return false };
            // It comes back with the agent's word.
            room.forget();
            if !self.put(ChannelInput::Data(STANDARD.encode(chunk))) {
                return false;
            }
        }
        !self.room.is_closed()
    }

    /// There will be no more bytes; whether it is still open.
    pub fn end(&self) -> bool {
        self.put(ChannelInput::End)
    }

    /// Its terminal has another size; whether it is still open.
    pub fn size(&self, size: Size) -> bool {
        self.put(ChannelInput::Size(size))
    }

    fn put(&self, input: ChannelInput) -> bool {
        !self.room.is_closed()
            && self.agent.upgrade().is_some_and(|agent| agent.send(ToAgent::Put { id: self.id, input }).is_ok())
    }
}

/// What comes out of a channel. Dropping it closes the channel.
pub struct ChannelReader {
    agent: mpsc::WeakUnboundedSender<ToAgent>,
    id: u64,
    channels: Arc<Channels>,
    said: Arc<Unread>,
}

impl ChannelReader {
    /// The next; `None` after the last, which is `Exit` or `Failed`. May be dropped before it is ready.
    pub async fn next(&mut self) -> Option<Said> {
        let said = self.said.next().await?;
        if let Said::Data(bytes) = &said {
            self.channels.read(self.id, bytes.len());
            if let Some(agent) = self.agent.upgrade() {
                let _ = agent.send(ToAgent::Put { id: self.id, input: ChannelInput::Room(bytes.len()) });
            }
        }
        Some(said)
    }
}

impl Drop for ChannelReader {
    fn drop(&mut self) {
        self.said.lock().unwanted = true;
        if self.channels.forget(self.id)
            && let Some(agent) = self.agent.upgrade()
        {
            let _ = agent.send(ToAgent::Put { id: self.id, input: ChannelInput::Close });
        }
    }
}

/// The channels of a connection.
pub(crate) type Channels = Numbered<Sink>;

/// What came out of a channel and was not read yet: never more than a window of bytes, and four other words.
#[derive(Default)]
struct Unread {
    queue: Mutex<Queue>,
    more: Notify,
}

#[derive(Default)]
struct Queue {
    said: VecDeque<Said>,
    /// Nothing more will come.
    over: bool,
    /// Nobody reads it any more.
    unwanted: bool,
}

impl Unread {
    fn lock(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds what was said; false if nobody wants it. Bytes go to those that wait already, however few they are.
    fn add(&self, said: Said) -> bool {
        let mut queue = self.lock();
        match (said, queue.said.back_mut()) {
            (Said::Data(more), Some(Said::Data(bytes))) => bytes.extend_from_slice(&more),
            (said, _) => queue.said.push_back(said),
        }
        self.more.notify_one();
        !queue.unwanted
    }

    async fn next(&self) -> Option<Said> {
        loop {
            {
                let mut queue = self.lock();
                if let Some(said) = queue.said.pop_front() {
                    return Some(said);
                }
                if queue.over {
                    return None;
                }
            }
            self.more.notified().await;
        }
    }
}

/// Where what comes out of a channel goes.
pub(crate) struct Sink {
    said: Arc<Unread>,
    room: Arc<Semaphore>,
    /// Bytes that were not read yet: never more than an agent that keeps to the protocol sends.
    unread: usize,
    opened: bool,
    ended: bool,
}

impl Drop for Sink {
    fn drop(&mut self) {
        self.room.close();
        self.said.lock().over = true;
        self.said.more.notify_one();
    }
}

impl Sink {
    fn new(said: Arc<Unread>, room: Arc<Semaphore>) -> Sink {
        Sink { said, room, unread: 0, opened: false, ended: false }
    }

    /// The connection is gone, and with it the channel.
    pub(crate) fn lost(self) {
        self.said.add(Said::Failed(LOST.to_owned()));
    }
}

impl Numbered<Sink> {
    fn read(&self, id: u64, bytes: usize) {
        if let Some(sink) = self.lock().sinks.get_mut(&id) {
            sink.unread = sink.unread.saturating_sub(bytes);
        }
    }

    /// Hands on what an agent said; false if it is to close the channel.
    pub(crate) fn put(&self, id: u64, output: ChannelOutput) -> bool {
        let mut open = self.lock();
        // What was said before a channel was closed from here crosses that.
        let Some(sink) = open.sinks.get_mut(&id) else { return true };
        let mut broken = false;
        let mut breaks = |why: String| {
            broken = true;
            Said::Failed(why)
        };
        let said = match output {
            ChannelOutput::Room(bytes) => {
                let most = WINDOW.saturating_sub(sink.room.available_permits());
                sink.room.add_permits(bytes.min(most));
                return true;
            }
            // What takes no room may be said once.
            ChannelOutput::Opened if !std::mem::replace(&mut sink.opened, true) => Said::Opened,
            ChannelOutput::End if !std::mem::replace(&mut sink.ended, true) => Said::End,
            ChannelOutput::Opened | ChannelOutput::End => breaks("the agent said twice what is said once".to_owned()),
            ChannelOutput::Exit(code) => Said::Exit(code),
            ChannelOutput::Failed(reason) => Said::Failed(reason),
            ChannelOutput::Data(text) => match STANDARD.decode(&text) {
                Ok(bytes) if bytes.is_empty() || sink.ended => {
                    breaks("the agent sent bytes where there are none to be".to_owned())
                }
                Ok(bytes) if sink.unread + bytes.len() <= WINDOW => {
                    sink.unread += bytes.len();
                    Said::Data(bytes)
                }
                Ok(_) => breaks("the agent sent more than there is room for".to_owned()),
                Err(e) => breaks(format!("the agent sent what is no base64: {e}")),
            },
        };
        let last = matches!(said, Said::Exit(_) | Said::Failed(_));
        let wanted = sink.said.add(said);
        if last || !wanted {
            open.sinks.remove(&id);
        }
        wanted && !broken
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A channel of a connection, and what was sent to its agent.
    fn channel() -> (Arc<Channels>, ChannelWriter, ChannelReader, mpsc::UnboundedReceiver<ToAgent>) {
        let (sender, sent) = mpsc::unbounded_channel();
        let said = Arc::<Unread>::default();
        let (channels, room) = (Arc::<Channels>::default(), Arc::new(Semaphore::new(WINDOW)));
        let id = channels.begin(Sink::new(said.clone(), room.clone())).expect("it is open");
        let agent = sender.downgrade();
        // As the connection does.
        std::mem::forget(sender);
        let writer = ChannelWriter { agent: agent.clone(), id, room };
        (channels.clone(), writer, ChannelReader { agent, id, channels, said }, sent)
    }

    fn data(bytes: usize) -> ChannelOutput {
        ChannelOutput::Data(STANDARD.encode(vec![b'x'; bytes]))
    }

    #[tokio::test]
    async fn what_is_put_in_waits_until_the_agent_has_room() {
        let (channels, writer, _reader, mut sent) = channel();
        assert!(writer.data(&[b'x'; WINDOW]).await);
        let more = writer.data(b"more");
        tokio::pin!(more);
        let waits = std::future::poll_fn(|context| std::task::Poll::Ready(more.as_mut().poll(context).is_pending()));
        assert!(waits.await);
        assert!(channels.put(1, ChannelOutput::Room(4)));
        assert!(more.await);
        // An agent that gives more than it took gives no more than the window.
        assert!(channels.put(1, ChannelOutput::Room(usize::MAX)));
        assert_eq!(writer.room.available_permits(), WINDOW);
        let mut sizes = Vec::new();
        while let Ok(ToAgent::Put { input: ChannelInput::Data(text), .. }) = sent.try_recv() {
            sizes.push(STANDARD.decode(text).expect("base64").len());
        }
        assert_eq!((sizes.iter().sum::<usize>(), sizes.iter().max()), (WINDOW + 4, Some(&CHUNK)));
    }

    #[tokio::test]
    async fn who_reads_gives_room() {
        let (channels, _writer, mut reader, mut sent) = channel();
        for output in [ChannelOutput::Opened, data(10), ChannelOutput::End, ChannelOutput::Exit(3)] {
            assert!(channels.put(1, output));
        }
        let mut said = Vec::new();
        while let Some(one) = reader.next().await {
            said.push(one);
        }
        assert_eq!(said, [Said::Opened, Said::Data(vec![b'x'; 10]), Said::End, Said::Exit(3)]);
        assert_eq!(sent.try_recv(), Ok(ToAgent::Put { id: 1, input: ChannelInput::Room(10) }));
        drop(reader);
        assert!(sent.try_recv().is_err(), "what has ended is not closed");
    }

    #[tokio::test]
    async fn an_agent_that_sends_what_it_may_not_is_cut_off() {
        for bad in [data(1), ChannelOutput::Data("?".to_owned())] {
            let (channels, writer, mut reader, _sent) = channel();
            assert!(channels.put(1, data(WINDOW)));
            assert!(!channels.put(1, bad), "the agent is told to close it");
            assert!(matches!(reader.next().await, Some(Said::Data(_))));
            assert!(matches!(reader.next().await, Some(Said::Failed(_))));
            assert_eq!(reader.next().await, None);
            assert!(!writer.data(b"x").await);
        }
    }

    #[tokio::test]
    async fn what_takes_no_room_is_no_way_to_fill_the_control_plane() {
        for repeated in [ChannelOutput::Opened, ChannelOutput::End] {
            let (channels, _writer, mut reader, _sent) = channel();
            assert!(channels.put(1, repeated.clone()) && !channels.put(1, repeated));
            assert!(matches!(reader.next().await, Some(Said::Opened | Said::End)));
            assert!(matches!(reader.next().await, Some(Said::Failed(why)) if why.contains("twice")));
            assert_eq!(reader.next().await, None);
        }
        for before in [ChannelOutput::Opened, ChannelOutput::End] {
            let (channels, _writer, _reader, _sent) = channel();
            // None at all; and some after their end.
            let bytes = data(usize::from(before == ChannelOutput::End));
            assert!(channels.put(1, before) && !channels.put(1, bytes));
        }
        let (channels, _writer, mut reader, _sent) = channel();
        for _ in 0..WINDOW {
            assert!(channels.put(1, data(1)));
        }
        assert_eq!(reader.said.lock().said.len(), 1, "bytes that come one by one wait as one piece");
        assert_eq!(reader.next().await, Some(Said::Data(vec![b'x'; WINDOW])));
    }

    #[test]
    fn a_command_that_no_message_holds_is_refused() {
        let most = 128 << 10;
        assert_eq!(fits(&["x".repeat(most - 1)]), Ok(()));
        assert!(matches!(fits(&["x".repeat(most)]), Err(ExecError::CommandTooLong { .. })));
        let argv: Vec<String> = vec![String::new(); most];
        assert!(fits(&argv).is_ok() && fits(argv.iter().chain([&"".to_owned()])).is_err());
        for longest in ["\u{1}".repeat(most - 1), "é".repeat(most / 2 - 1)] {
            let (rank, size) = (None, Size { columns: 80, rows: 24 });
            assert_eq!(fits([&longest]), Ok(()));
            let channel = Channel::Terminal { argv: vec![longest], size, term: None };
            let line = aviflow_agent::protocol::wire::line(&ToAgent::Open { id: u64::MAX, rank, channel });
            assert!(line.len() < aviflow_agent::protocol::MAX_LINE);
        }
    }

    #[tokio::test]
    async fn who_goes_away_closes_it_and_a_lost_connection_ends_it() {
        let (channels, writer, reader, mut sent) = channel();
        drop(reader);
        assert_eq!(sent.try_recv(), Ok(ToAgent::Put { id: 1, input: ChannelInput::Close }));
        assert!(channels.put(1, data(1)), "it crossed the end");
        assert!(!writer.end());
        let (channels, writer, mut reader, _sent) = channel();
        channels.end(Sink::lost);
        assert!(matches!(reader.next().await, Some(Said::Failed(why)) if why.contains("was lost")));
        assert!(!writer.data(b"x").await);
    }
}
