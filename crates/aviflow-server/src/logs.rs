//! Output of jobs, line by line.

use crate::access::Caller;
use crate::app::{App, blocking};
use crate::error::Failure;
use crate::follow::{Ending, Signals};
use crate::names::resolve;
use crate::params::{Name, Values, flag, instant, ranks};
use crate::secret::masked;
use aviflow_api::rest::LogLine;
use aviflow_core::model::JobId;
use aviflow_store::telemetry::{self, Grep, LogFollower, LogSource};
use axum::body::{Body, Bytes};
use axum::extract::State;
use axum::http::header;
use axum::response::{IntoResponse, Response};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::io;
use std::sync::Arc;
use tokio::sync::mpsc;
use tokio_stream::StreamExt;
use tokio_stream::wrappers::ReceiverStream;

/// Batches of lines that wait for a slow client.
const BATCHES: usize = 2;

/// Lines of a key block that are masked before it is taken for something else.
const KEY_LINES: u32 = 200;

/// Which lines.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub(crate) struct LogsQuery {
    #[serde(default, deserialize_with = "flag")]
    follow: Option<bool>,
    attempt: Option<u32>,
    rank: Option<String>,
    since: Option<String>,
    grep: Option<String>,
    tail: Option<usize>,
}

impl LogsQuery {
    fn lines(&self, app: &App) -> Result<telemetry::Query, Failure> {
        let since = match &self.since {
            Some(text) => Some(instant("since", text, app.view(|view| view.now)?)?),
            None => None,
        };
        Ok(telemetry::Query {
            attempt: self.attempt,
            ranks: self.rank.as_deref().map(ranks).transpose()?,
            since,
            grep: self.grep.clone().map(|text| Grep { text, ignore_case: false }),
            tail: self.tail,
        })
    }
}

/// Lines of a job as they come, each once, with secrets masked.
pub(crate) struct Lines {
    follower: LogFollower,
    masker: Masker,
}

impl Lines {
    pub(crate) fn new(app: &App, job: JobId, query: telemetry::Query) -> Result<Lines, Failure> {
        let follower = app.parts.telemetry.follow_logs(job, query);
        let follower = follower.map_err(|e| Failure::io("the log cannot be read", &e))?;
        Ok(Lines { follower, masker: Masker::default() })
    }

    /// What came since; after a batch that is not empty, more may be there.
    pub(crate) fn next(&mut self) -> Result<Vec<LogLine>, Failure> {
        let batch = self.follower.next_batch().map_err(|e| Failure::io("the log cannot be read", &e))?;
        Ok(batch.into_iter().map(|line| self.masker.line(line)).collect())
    }
}

/// Masks lines. A key block spans many, so it is remembered for each source.
#[derive(Default)]
struct Masker {
    in_key: BTreeMap<(u32, u32, u32, &'static str), u32>,
}

impl Masker {
    fn line(&mut self, line: telemetry::LogLine) -> LogLine {
        let stream = match line.source {
            LogSource::Out => "stdout",
            LogSource::Err => "stderr",
            LogSource::Agent => "agent",
        };
        let source = (line.attempt, line.worker, line.rank, stream);
        let text = self.text(source, &line.text);
        LogLine {
            at: line.at.0,
            attempt: line.attempt,
            worker: line.worker,
            rank: line.rank,
            stream: stream.to_owned(),
            text,
        }
    }

    fn text(&mut self, source: (u32, u32, u32, &'static str), text: &str) -> String {
        if let Some(left) = self.in_key.remove(&source) {
            if text.contains("-----END ") {
                return masked(text);
            }
            if left > 0 {
                self.in_key.insert(source, left - 1);
                return "*".repeat(text.chars().count());
            }
        }
        if text.contains("PRIVATE KEY-----") && text.contains("-----BEGIN ") && !text.contains("-----END ") {
            self.in_key.insert(source, KEY_LINES);
        }
        masked(text)
    }
}

pub(crate) async fn logs(
    State(app): State<Arc<App>>,
    caller: Caller,
    Name(name): Name,
    Values(query): Values<LogsQuery>,
) -> Result<Response, Failure> {
    let state = app.clone();
    let follow = query.follow == Some(true);
    let (job, signals, lines) = blocking(move || {
        let job = resolve(&state, &name, &caller)?;
        // Marked before the first line is read, so that nothing falls between.
        let signals = Signals::new(&state, job);
        Ok((job, signals, Lines::new(&state, job, query.lines(&state)?)?))
    })
    .await?;
    let (sender, receiver) = mpsc::channel(BATCHES);
    tokio::spawn(async move {
        if let Err(failure) = send(app, job, lines, follow, signals, &sender).await {
            // A body that breaks off is no log that ends.
            let _ = sender.send(Err(io::Error::other(failure.error.message))).await;
        }
    });
    let body = Body::from_stream(ReceiverStream::new(receiver));
    Ok(([(header::CONTENT_TYPE, "application/x-ndjson")], body).into_response())
}

async fn send(
    app: Arc<App>,
    job: JobId,
    mut lines: Lines,
    follow: bool,
    mut signals: Signals,
    sender: &mpsc::Sender<io::Result<Bytes>>,
) -> Result<(), Failure> {
    let mut ending = Ending::default();
    loop {
        signals.mark();
        // Whether it was over is asked before the lines are read: what came before is then among them.
        let over = !follow || ending.over();
        loop {
            let batch;
            (lines, batch) = blocking(move || {
                let batch = lines.next()?;
                let mut text = Vec::new();
                batch.iter().for_each(|line| put_line(&mut text, line));
                Ok((lines, text))
            })
            .await?;
            if batch.is_empty() {
                break;
            }
            if *app.stopping.borrow() || sender.send(Ok(batch.into())).await.is_err() {
                return Ok(());
            }
        }
        if over {
            return Ok(());
        }
        ending.look(&app, job).await?;
        tokio::select! {
            alive = signals.changed(false) => if !alive { return Ok(()) },
            () = ending.wait() => {}
            () = sender.closed() => return Ok(()),
            () = app.stopped() => return Ok(()),
        }
    }
}

fn put_line<T: Serialize>(text: &mut Vec<u8>, line: &T) {
    // Types of the API have string keys only, and a vector takes everything.
    let _ = serde_json::to_writer(&mut *text, line);
    text.push(b'\n');
}

/// A stream of JSON values, one a line.
pub(crate) fn ndjson<T: Serialize + Send + 'static>(receiver: mpsc::Receiver<T>) -> Response {
    let lines = ReceiverStream::new(receiver).map(|value| {
        let mut text = Vec::new();
        put_line(&mut text, &value);
        Ok::<Bytes, io::Error>(text.into())
    });
    ([(header::CONTENT_TYPE, "application/x-ndjson")], Body::from_stream(lines)).into_response()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_block_is_masked_over_its_lines_and_only_in_its_stream() {
        let mut masker = Masker::default();
        let out = (1, 0, 0, "stdout");
        let begin = ["-----BEGIN RSA PRIVATE", " KEY-----"].concat();
        assert_eq!(masker.text(out, &begin), begin);
        assert_eq!(masker.text((1, 0, 1, "stdout"), "loss 3.1"), "loss 3.1");
        assert_eq!(masker.text(out, "MIIabc"), "******");
        let end = ["-----END RSA PRIVATE", " KEY-----"].concat();
        assert_eq!(masker.text(out, &end), end);
        assert_eq!(masker.text(out, "loss 3.0"), "loss 3.0");
    }
}
