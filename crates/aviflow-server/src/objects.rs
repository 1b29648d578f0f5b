//! Code archives and locks, uploaded under the hash of their content.

use crate::app::{App, blocking};
use crate::error::Failure;
use crate::params::{Name, Values};
use crate::submit::is_sha256;
use aviflow_api::rest::ObjectInfo;
use axum::Json;
use axum::body::{Body, Bytes};
use axum::extract::State;
use axum::http::{HeaderMap, StatusCode, header};
use serde::Deserialize;
use std::io::{self, Read};
use std::sync::Arc;
use tokio::sync::mpsc;
use tokio_stream::StreamExt;

/// Pieces of an upload that wait for the disk.
const PIECES: usize = 16;

pub(crate) async fn head(
    State(app): State<Arc<App>>,
    Name(hash): Name,
) -> Result<(StatusCode, [(header::HeaderName, String); 1]), Failure> {
    check_name(&hash)?;
    blocking(move || {
        let objects = &app.parts.objects;
        // Whoever asks is about to submit what refers to it.
        if !objects.touch(&hash).map_err(|e| Failure::io("the object cannot be kept", &e))? {
            return Err(Failure::not_found("noSuchObject", format!("there is no object {hash}")));
        }
        let bytes = objects.size(&hash).map_err(|e| Failure::io("the object cannot be read", &e))?;
        Ok((StatusCode::OK, [(header::CONTENT_LENGTH, bytes.to_string())]))
    })
    .await
}

fn check_name(hash: &str) -> Result<(), Failure> {
    if is_sha256(hash) {
        return Ok(());
    }
    Err(Failure::bad(format!("`{hash}` is no SHA-256 in 64 hexadecimal digits")))
}

/// How much may come.
#[derive(Clone, Debug, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub(crate) struct PutQuery {
    allow_bytes: Option<u64>,
}

pub(crate) async fn put(
    State(app): State<Arc<App>>,
    Name(hash): Name,
    Values(query): Values<PutQuery>,
    headers: HeaderMap,
    body: Body,
) -> Result<(StatusCode, Json<ObjectInfo>), Failure> {
    check_name(&hash)?;
    let limit = query.allow_bytes.unwrap_or(0).max(app.parts.config.max_upload);
    let length = headers.get(header::CONTENT_LENGTH).and_then(|h| h.to_str().ok()?.parse::<u64>().ok());
    if length.is_some_and(|n| n > limit) {
        return Err(over(limit));
    }
    let turn = app.transfer().await;
    let (sender, receiver) = mpsc::channel(PIECES);
    // Sent from a task of its own: the disk must not wait for the network within one.
    let pump = tokio::spawn(async move {
        let mut pieces = body.into_data_stream();
        while let Some(piece) = pieces.next().await {
            let piece = piece.map_err(|e| io::Error::new(io::ErrorKind::UnexpectedEof, e.to_string()));
            let broken = piece.is_err();
            if sender.send(piece).await.is_err() || broken {
                return;
            }
        }
    });
    let stored = blocking(move || {
        let _turn = turn;
        let mut upload = Upload { receiver, piece: Bytes::new(), left: limit };
        let stored = app.parts.objects.put_expected(&hash, &mut upload);
        let bytes = stored.map_err(|e| match e.kind() {
            io::ErrorKind::FileTooLarge => over(limit),
            io::ErrorKind::InvalidData => Failure::refused("wrongContent", e.to_string()),
            io::ErrorKind::UnexpectedEof => Failure::bad(format!("the upload ended early: {e}")).help("send it again"),
            _ => Failure::io("the object cannot be stored", &e),
        })?;
        Ok((StatusCode::CREATED, Json(ObjectInfo { sha256: hash, bytes })))
    })
    .await;
    pump.abort();
    stored
}

fn over(limit: u64) -> Failure {
    Failure::too_large(format!("the object has more than {limit} bytes, which is the limit"))
        .help("exclude large files with `.aviflowignore`, or allow so many with `?allowBytes=N`")
}

/// An upload as the store reads it.
struct Upload {
    receiver: mpsc::Receiver<io::Result<Bytes>>,
    piece: Bytes,
    left: u64,
}

impl Read for Upload {
    fn read(&mut self, out: &mut [u8]) -> io::Result<usize> {
        while self.piece.is_empty() {
            match self.receiver.blocking_recv() {
                Some(piece) => self.piece = piece?,
                None => return Ok(0),
            }
            let bytes = self.piece.len() as u64;
            self.left = self.left.checked_sub(bytes).ok_or_else(|| io::Error::from(io::ErrorKind::FileTooLarge))?;
        }
        let n = out.len().min(self.piece.len());
        let taken = self.piece.split_to(n);
        out[..n].copy_from_slice(&taken);
        Ok(n)
    }
}
