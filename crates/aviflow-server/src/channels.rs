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
}

pub(crate) async fn open(
    State(app): State<Arc<App>>,
    caller: Caller,
    Name(name): Name,
    Input(asked): Input<OpenChannel>,
) -> Result<Response, Failure> {
    let (state, user) = (app.clone(), caller.user.clone());
    let (opening, channel) = blocking(move || begin(&state, &name, &caller, asked)).await?;
    let (sender, receiver) = mpsc::channel(FRAMES);
    tokio::spawn(carry(app, opening, channel, user, sender));
    Ok(ndjson(receiver))
}

fn begin(app: &App, name: &str, caller: &Caller, asked: OpenChannel) -> Result<(Opening, String), Failure> {
    match &asked.to {
        ChannelTo::Terminal { argv, .. } if argv.is_empty() => {
            return Err(Failure::bad("no command was given").help("put it in `argv`"));
        }
        ChannelTo::Port { port: 0 } => return Err(Failure::bad("there is no port 0").help("ports are 1 to 65535")),
        ChannelTo::Terminal { .. } | ChannelTo::Port { .. } => {}
    }
    let rank = asked.rank.unwrap_or(0);
    let target = gang(app, name, caller, "nothing of it can be reached")?.beside(rank)?;
    if app.channels.lock().len() >= MOST {
        let message = format!("{MOST} terminals and connections into jobs are open, which is the limit");
        return Err(
            Failure::new(StatusCode::SERVICE_UNAVAILABLE, "tooManyChannels", message).help("close some, and try again")
        );
    }
    let mut random = [0u8; 16];
    let drawn = File::open("/dev/urandom").and_then(|mut file| file.read_exact(&mut random));
    drawn.map_err(|e| Failure::io("a name for the channel cannot be drawn", &e))?;
    let opening = app.parts.body.open(target, Some(rank), asked.to).map_err(refused)?;
    Ok((opening, hex(&random)))
}

/// Carries a channel until it ends, or nobody is at one of its ends any more.
async fn carry(app: Arc<App>, opening: Opening, channel: String, user: String, to: mpsc::Sender<ChannelFrame>) {
    let Opening { input, mut output } = opening;
    let (heard, mut hears) = watch::channel(Instant::now());
    let before = app.channels.lock().insert(channel.clone(), Entry { user, input, heard });
    debug_assert!(before.is_none(), "names are drawn");
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
        // A client that reads nothing is as good as gone once it says nothing either.
        let sent = tokio::select! {
            sent = to.send(frame) => sent.is_ok(),
            () = sleep_until(silent_at) => false,
        };
        if last || !sent {
            break;
        }
    }
    app.channels.lock().remove(&channel);
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
