//! Terminals and connections into running jobs.
//!
//! What comes out of a channel is one long answer; what goes in comes in requests of its own, one after the other.
//! A client gives signs of life, as a network that was cut says nothing by itself: a terminal that nobody sees any
//! more is closed.

use crate::access::Caller;
use crate::app::{App, blocking};
use crate::body::Opening;
use crate::error::Failure;
use crate::exec::{gang, refused};
use crate::logs::ndjson;
use crate::params::{Input, Name};
use aviflow_api::environment::hex;
use aviflow_api::rest::{ChannelFrame, ChannelInput, ChannelTo, OpenChannel};
use axum::extract::{Path, State};
use axum::http::StatusCode;
use axum::response::Response;
use std::collections::BTreeMap;
use std::fs::File;
use std::io::Read;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use tokio::sync::{mpsc, watch};
use tokio::time::{Instant, interval, sleep_until};

/// Frames that wait for a slow client.
const FRAMES: usize = 16;
/// Bytes that may be put in at once, as base64.
const DATA: usize = (256 << 10) / 3 * 4 + 4;
/// Between two signs of life of the control plane: less than proxies keep a connection on which nothing is said.
const ALIVE: Duration = Duration::from_secs(20);
/// Without a sign of life of the client for so long, its channel is closed.
const SILENCE: Duration = Duration::from_secs(60);
/// Channels that may be open at once: each holds a connection, and buffers.
const MOST: usize = 1000;
/// How many of them one user may have: a script that forgets to close its own takes nobody else's.
const MOST_OF_USER: usize = 100;

/// The channels that are open, by their names, which nobody guesses.
#[derive(Default)]
pub(crate) struct Channels(Mutex<BTreeMap<String, Entry>>);

struct Entry {
    user: String,
    input: mpsc::Sender<ChannelInput>,
    heard: watch::Sender<Instant>,
}

impl Channels {
    fn lock(&self) -> MutexGuard<'_, BTreeMap<String, Entry>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether a user may open another one.
    fn has_room(open: &BTreeMap<String, Entry>, user: &str) -> Result<(), Failure> {
        let refused = |message| Failure::new(StatusCode::SERVICE_UNAVAILABLE, "tooManyChannels", message);
        if open.values().filter(|entry| entry.user == user).count() >= MOST_OF_USER {
            let message =
                format!("you have {MOST_OF_USER} terminals and connections into jobs open, which is the limit");
            return Err(refused(message).help("close some of yours, and try again"));
        }
        if open.len() >= MOST {
            let message =
                format!("{MOST} terminals and connections into jobs of all users are open, which is the limit");
            return Err(refused(message).help("try again in a moment"));
        }
        Ok(())
    }

    /// Takes in one that was opened, if there is still room.
    fn add(&self, channel: &str, user: &str, input: mpsc::Sender<ChannelInput>) -> Result<Hears, Failure> {
        let (heard, hears) = watch::channel(Instant::now());
        let mut open = self.lock();
        Self::has_room(&open, user)?;
        let before = open.insert(channel.to_owned(), Entry { user: user.to_owned(), input, heard });
        debug_assert!(before.is_none(), "names are drawn");
        Ok(hears)
    }
}

/// When the client gave its last sign of life; an error once it has closed its channel.
type Hears = watch::Receiver<Instant>;

pub(crate) async fn open(
    State(app): State<Arc<App>>,
    caller: Caller,
    Name(name): Name,
    Input(asked): Input<OpenChannel>,
) -> Result<Response, Failure> {
    let state = app.clone();
    let (output, channel, hears) = blocking(move || begin(&state, &name, &caller, asked)).await?;
    let (sender, receiver) = mpsc::channel(FRAMES);
    tokio::spawn(carry(app, output, channel, hears, sender));
    Ok(ndjson(receiver))
}

/// What comes out of a channel, its name, and its client's signs of life.
type Begun = (mpsc::Receiver<ChannelFrame>, String, Hears);

fn begin(app: &App, name: &str, caller: &Caller, asked: OpenChannel) -> Result<Begun, Failure> {
    match &asked.to {
        ChannelTo::Terminal { argv, .. } if argv.is_empty() => {
            return Err(Failure::bad("no command was given").help("put it in `argv`"));
        }
        ChannelTo::Port { port: 0 } => return Err(Failure::bad("there is no port 0").help("ports are 1 to 65535")),
        ChannelTo::Terminal { .. } | ChannelTo::Port { .. } => {}
    }
    let rank = asked.rank.unwrap_or(0);
    let target = gang(app, name, caller, "nothing of it can be reached")?.beside(rank)?;
    Channels::has_room(&app.channels.lock(), &caller.user)?;
    let mut random = [0u8; 16];
    let drawn = File::open("/dev/urandom").and_then(|mut file| file.read_exact(&mut random));
    drawn.map_err(|e| Failure::io("a name for the channel cannot be drawn", &e))?;
    let Opening { input, output } = app.parts.body.open(target, Some(rank), asked.to).map_err(refused)?;
    let channel = hex(&random);
    let hears = app.channels.add(&channel, &caller.user, input)?;
    Ok((output, channel, hears))
}

/// Carries a channel until it ends, or nobody is at one of its ends any more.
async fn carry(
    app: Arc<App>,
    mut output: mpsc::Receiver<ChannelFrame>,
    channel: String,
    mut hears: Hears,
    to: mpsc::Sender<ChannelFrame>,
) {
    let mut alive = interval(ALIVE);
    alive.tick().await;
    loop {
        let silent_at = *hears.borrow_and_update() + SILENCE;
        let frame = tokio::select! {
            frame = output.recv() => frame,
            () = to.closed() => None,
            _ = alive.tick() => Some(ChannelFrame::Alive),
            changed = hears.changed() => match changed {
                Ok(()) => continue,
                // The client closed it.
                Err(_) => None,
            },
            () = sleep_until(silent_at) => {
                let reason = format!("nothing was heard of the client for {} s", SILENCE.as_secs());
                Some(ChannelFrame::Failed { reason })
            }
            () = app.stopped() => {
                Some(ChannelFrame::Failed { reason: "the control plane is stopping; try again in a moment".into() })
            }
        };
        let frame = match frame {
            Some(ChannelFrame::Opened { .. }) => ChannelFrame::Opened { channel: channel.clone() },
            Some(frame) => frame,
            None => break,
        };
        let last = matches!(frame, ChannelFrame::Exit { .. } | ChannelFrame::Failed { .. });
        let sent = tokio::select! {
            sent = hand_on(&to, frame, &mut hears) => sent,
            () = app.stopped() => false,
        };
        if last || !sent {
            break;
        }
    }
    app.channels.lock().remove(&channel);
}

/// Hands a frame on as soon as the client takes it; false if nobody does. A client that reads nothing for long is
/// waited for as long as it gives signs of life.
async fn hand_on(to: &mpsc::Sender<ChannelFrame>, frame: ChannelFrame, hears: &mut Hears) -> bool {
    let send = to.send(frame);
    tokio::pin!(send);
    loop {
        let silent_at = *hears.borrow_and_update() + SILENCE;
        tokio::select! {
            sent = &mut send => return sent.is_ok(),
            changed = hears.changed() => {
                if changed.is_err() {
                    return false;
                }
            }
            () = sleep_until(silent_at) => return false,
        }
    }
}

pub(crate) async fn put(
    State(app): State<Arc<App>>,
    caller: Caller,
    Path((_, channel)): Path<(String, String)>,
    Input(input): Input<ChannelInput>,
) -> Result<StatusCode, Failure> {
    if input.data.len() > DATA {
        return Err(Failure::too_large("more than 256 KiB were put into a channel at once").help("send them in parts"));
    }
    let gone = || Failure::not_found("noSuchChannel", "this channel is not open any more").help("open a new one");
    let sender = {
        let mut channels = app.channels.lock();
        let entry = channels.get(&channel).filter(|entry| entry.user == caller.user).ok_or_else(gone)?;
        entry.heard.send_replace(Instant::now());
        let sender = entry.input.clone();
        if input.close {
            channels.remove(&channel);
            return Ok(StatusCode::NO_CONTENT);
        }
        sender
    };
    if input != ChannelInput::default() {
        // Until there is room: who puts in more waits.
        sender.send(input).await.map_err(|_| gone())?;
    }
    Ok(StatusCode::NO_CONTENT)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::task::Poll;

    #[tokio::test]
    async fn a_client_that_reads_nothing_is_kept_as_long_as_it_gives_signs_of_life() {
        let (to, mut client) = mpsc::channel(1);
        let (heard, mut hears) = watch::channel(Instant::now());
        assert!(hand_on(&to, ChannelFrame::End, &mut hears).await);
        let waits = async |hears: &mut Hears| {
            let sent = hand_on(&to, ChannelFrame::Alive, hears);
            tokio::pin!(sent);
            std::future::poll_fn(|context| Poll::Ready(sent.as_mut().poll(context).is_pending())).await
        };
        assert!(waits(&mut hears).await, "there is no room, and it was heard of");
        let long_ago = Instant::now().checked_sub(SILENCE).expect("the machine runs for longer");
        let mut sent = Box::pin(hand_on(&to, ChannelFrame::Alive, &mut hears));
        assert!(std::future::poll_fn(|context| Poll::Ready(sent.as_mut().poll(context).is_pending())).await);
        // What counts is when it was heard last, not when the wait began.
        heard.send_replace(long_ago);
        assert!(!sent.as_mut().await);
        drop(sent);
        heard.send_replace(Instant::now());
        assert!(waits(&mut hears).await);
        client.recv().await;
        assert!(hand_on(&to, ChannelFrame::Alive, &mut hears).await);
        drop(heard);
        assert!(!hand_on(&to, ChannelFrame::Alive, &mut hears).await, "it has closed its channel");
    }

    #[test]
    fn one_user_cannot_take_all_channels() {
        let channels = Channels::default();
        let (input, _) = mpsc::channel(1);
        let open = |user: &str, n: usize| channels.add(&format!("{user}-{n}"), user, input.clone()).map(drop);
        for n in 0..MOST_OF_USER {
            assert!(open("ada", n).is_ok());
        }
        assert!(open("ada", MOST_OF_USER).is_err() && open("bob", 0).is_ok());
        for n in 0..MOST {
            let _ = open(&format!("user-{}", n / 50), n);
        }
        assert_eq!(channels.lock().len(), MOST);
        assert!(open("eve", 0).is_err(), "all have a limit, too");
    }
}
