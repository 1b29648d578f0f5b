//! Files that a job keeps, as a tar archive.
//!
//! Nothing outside of the job's own folders is ever read: a path with `..` is
//! refused, and so is a link that leads out. Links that stay inside are
//! followed if asked for by name, and archived as links where they are relative.

use crate::access::Caller;
use crate::app::{App, blocking};
use crate::error::Failure;
use crate::names::resolve;
use crate::params::{Name, Values};
use axum::body::{Body, Bytes};
use axum::extract::State;
use axum::http::header;
use axum::response::{IntoResponse, Response};
use serde::Deserialize;
use std::fs::{self, File, Metadata};
use std::io::{self, Read, Write};
use std::os::unix::fs::MetadataExt;
use std::path::{Component, Path, PathBuf};
use std::sync::Arc;
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;

/// Bytes of a piece of the archive.
const PIECE: usize = 64 << 10;

/// Pieces that wait for a slow client.
const PIECES: usize = 8;

/// Names shown where a path is missing.
const SHOWN: usize = 20;

/// Which path.
#[derive(Clone, Debug, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub(crate) struct FilesQuery {
    path: Option<String>,
}

pub(crate) async fn files(
    State(app): State<Arc<App>>,
    caller: Caller,
    Name(name): Name,
    Values(query): Values<FilesQuery>,
) -> Result<Response, Failure> {
    let state = app.clone();
    let path = query.path.unwrap_or_default();
    let entries = blocking(move || {
        let job = resolve(&state, &name, &caller)?;
        collect(&state.parts.body.volumes(job), &path)
    })
    .await?;
    let (sender, receiver) = mpsc::channel(PIECES);
    let turn = app.transfer().await;
    tokio::task::spawn_blocking(move || {
        let _turn = turn;
        let mut out = Pieces { sender, piece: Vec::with_capacity(PIECE), app };
        if let Err(error) = archive(entries, &mut out) {
            // The client sees a transfer that breaks off, which is not the same as one that ends.
            let _ = out.sender.blocking_send(Err(error));
        }
    });
    let body = Body::from_stream(ReceiverStream::new(receiver));
    Ok(([(header::CONTENT_TYPE, "application/x-tar")], body).into_response())
}

/// Something to archive.
#[derive(Debug)]
struct Entry {
    /// Where it is.
    path: PathBuf,
    /// Its name in the archive.
    name: PathBuf,
    meta: Metadata,
}

/// Everything beneath a path, folders before what they hold.
fn collect(volumes: &Path, path: &str) -> Result<Vec<Entry>, Failure> {
    let relative = relative(path)?;
    let nothing = || {
        Failure::not_found("noSuchFile", "the job has kept no files")
            .help("declare `outputs` or `checkpoint` in its document")
    };
    let root = volumes.canonicalize().map_err(|_| nothing())?;
    let wanted = root.join(&relative);
    let Ok(real) = wanted.canonicalize() else { return Err(missing(&root, &relative)) };
    if !real.starts_with(&root) {
        return Err(leads_out(&relative));
    }
    let io = |e: io::Error| Failure::io("the files cannot be read", &e);
    let name = relative.file_name().map(PathBuf::from).unwrap_or_default();
    let mut entries = Vec::new();
    let mut open = vec![(real, name)];
    while let Some((path, name)) = open.pop() {
        let meta = fs::symlink_metadata(&path).map_err(io)?;
        if meta.is_symlink() {
            // A link to nothing holds nothing that could be fetched.
            let Ok(target) = path.canonicalize() else { continue };
            if !target.starts_with(&root) {
                return Err(leads_out(path.strip_prefix(&root).unwrap_or(&name)));
            }
            if fs::read_link(&path).map_err(io)?.is_absolute() {
                // It means nothing on another machine.
                continue;
            }
        }
        if meta.is_dir() {
            let mut inside: Vec<PathBuf> = Vec::new();
            for entry in fs::read_dir(&path).map_err(io)? {
                inside.push(entry.map_err(io)?.path());
            }
            inside.sort_unstable();
            let named = |p: PathBuf| p.file_name().map(|f| name.join(f)).map(|n| (p, n));
            open.extend(inside.into_iter().rev().filter_map(named));
        }
        let special = !(meta.is_dir() || meta.is_file() || meta.is_symlink());
        // Sockets and pipes hold nothing; the root itself has no name.
        if !special && !name.as_os_str().is_empty() {
            entries.push(Entry { path, name, meta });
        }
    }
    Ok(entries)
}

/// The path below the job's folders.
fn relative(path: &str) -> Result<PathBuf, Failure> {
    let mut relative = PathBuf::new();
    for component in Path::new(path).components() {
        match component {
            Component::Normal(name) => relative.push(name),
            Component::RootDir | Component::CurDir => {}
            Component::ParentDir | Component::Prefix(_) => {
                return Err(Failure::bad(format!("`{path}` leads upwards"))
                    .help("give a path of the job's document, such as `/out/model.bin`"));
            }
        }
    }
    if path.contains('\0') {
        return Err(Failure::bad("a path holds no zero byte"));
    }
    Ok(relative)
}

fn leads_out(path: &Path) -> Failure {
    let message = format!("`/{}` is a link that leads out of the job's folders", path.display());
    Failure::refused("linkOut", message).help("copy what it points to into an output")
}

/// Says what is there instead.
fn missing(root: &Path, relative: &Path) -> Failure {
    let failure = Failure::not_found("noSuchFile", format!("the job has no file `/{}`", relative.display()));
    let mut nearest = relative.to_path_buf();
    loop {
        if !nearest.pop() {
            nearest = PathBuf::new();
        }
        let folder = root.join(&nearest);
        let inside = folder.canonicalize().ok().filter(|real| real.starts_with(root));
        if let Some(real) = inside
            && let Ok(names) = fs::read_dir(real)
        {
            let mut names: Vec<String> =
                names.flatten().map(|e| format!("/{}", nearest.join(e.file_name()).display())).collect();
            names.sort_unstable();
            let more = if names.len() > SHOWN { ", …" } else { "" };
            names.truncate(SHOWN);
            return match names.is_empty() {
                true => failure.help(format!("`/{}` is empty", nearest.display())),
                false => failure.help(format!("there are: {}{more}", names.join(", "))),
            };
        }
        if nearest.as_os_str().is_empty() {
            return failure;
        }
    }
}

fn archive(entries: Vec<Entry>, out: &mut Pieces) -> io::Result<()> {
    let mut tar = tar::Builder::new(&mut *out);
    for Entry { path, name, meta } in entries {
        let mut header = tar::Header::new_gnu();
        header.set_metadata_in_mode(&meta, tar::HeaderMode::Complete);
        // Who owned it here means nothing there.
        header.set_uid(0);
        header.set_gid(0);
        if meta.is_symlink() {
            header.set_size(0);
            tar.append_link(&mut header, &name, fs::read_link(&path)?)?;
        } else if meta.is_dir() {
            header.set_size(0);
            tar.append_data(&mut header, &name, io::empty())?;
        } else {
            let file = File::open(&path)?;
            let now = file.metadata()?;
            // Exchanged for a link since it was looked at.
            if (now.dev(), now.ino()) != (meta.dev(), meta.ino()) {
                return Err(io::Error::other(format!("{} was replaced while it was read", name.display())));
            }
            header.set_size(now.len());
            let mut content = Whole { file: file.take(now.len()), left: now.len() };
            tar.append_data(&mut header, &name, &mut content)?;
        }
    }
    tar.finish()?;
    drop(tar);
    out.flush()
}

/// A file that must not become shorter: its length is already written.
struct Whole {
    file: io::Take<File>,
    left: u64,
}

impl Read for Whole {
    fn read(&mut self, out: &mut [u8]) -> io::Result<usize> {
        let n = self.file.read(out)?;
        self.left -= n as u64;
        if n == 0 && !out.is_empty() && self.left > 0 {
            return Err(io::Error::new(io::ErrorKind::UnexpectedEof, "a file became shorter while it was read"));
        }
        Ok(n)
    }
}

/// Collects small writes, hands them on in pieces, and waits for the client.
struct Pieces {
    sender: mpsc::Sender<io::Result<Bytes>>,
    piece: Vec<u8>,
    app: Arc<App>,
}

impl Write for Pieces {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.piece.extend_from_slice(bytes);
        if self.piece.len() >= PIECE {
            self.flush()?;
        }
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        if self.piece.is_empty() {
            return Ok(());
        }
        if *self.app.stopping.borrow() {
            return Err(io::Error::other("the control plane is stopping"));
        }
        let piece = std::mem::replace(&mut self.piece, Vec::with_capacity(PIECE));
        self.sender.blocking_send(Ok(piece.into())).map_err(|_| io::Error::from(io::ErrorKind::BrokenPipe))
    }
}
