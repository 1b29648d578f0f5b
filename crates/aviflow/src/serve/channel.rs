//! Channels into workers, as the server asks for them; the same for both bodies.

use super::body::hand_over;
use aviflow_agent::protocol::Channel;
use aviflow_agent::protocol::channel::Size;
use aviflow_api::rest::{ChannelFrame, ChannelInput, ChannelTo, TerminalSize, WorkerStacks};
use aviflow_link::{ChannelReader, ChannelWriter, ExecError, Said};
use aviflow_server::{ExecRefusal, Opening, Telling};
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use tokio::runtime::Handle;
use tokio::sync::mpsc;

/// Frames that wait for a slow client, and inputs for a slow worker.
const FRAMES: usize = 8;

/// Bytes of a worker's stacks that are taken at most.
const STACKS: usize = 32 << 20;

type Opened = Result<(ChannelWriter, ChannelReader), ExecError>;

/// Where a channel leads, as agents know it.
pub fn to(to: ChannelTo) -> Channel {
    match to {
        ChannelTo::Terminal { argv, size, term } => Channel::Terminal { argv, size: self::size(size), term },
        ChannelTo::Port { port } => Channel::Port { port },
    }
}

fn size(TerminalSize { columns, rows }: TerminalSize) -> Size {
    Size { columns, rows }
}

/// An opened channel as the server hands it on.
pub fn opening(opened: Opened, runtime: &Handle) -> Result<Opening, ExecRefusal> {
    let (writer, mut reader) = opened.map_err(|e| ExecRefusal(e.to_string()))?;
    let (input, mut inputs) = mpsc::channel(FRAMES);
    let (frames, output) = mpsc::channel(FRAMES);
    let complaints = frames.clone();
    runtime.spawn(async move {
        while let Some(one) = inputs.recv().await {
            match put(&writer, one).await {
                Ok(true) => {}
                Ok(false) => return,
                Err(reason) => {
                    let _ = complaints.send(ChannelFrame::Failed { reason }).await;
                    return;
                }
            }
        }
    });
    runtime.spawn(hand_over(async move || reader.next().await.map(frame), frames));
    Ok(Opening { input, output })
}

/// Whether it is still open, or what is wrong with the input.
async fn put(writer: &ChannelWriter, input: ChannelInput) -> Result<bool, String> {
    let bytes = STANDARD.decode(&input.data).map_err(|e| format!("what was put in is no base64: {e}"))?;
    let mut open = true;
    if let Some(size) = input.size {
        open = writer.size(self::size(size));
    }
    if !bytes.is_empty() {
        open = open && writer.data(&bytes).await;
    }
    if input.end {
        open = open && writer.end();
    }
    Ok(open)
}

fn frame(said: Said) -> ChannelFrame {
    match said {
        Said::Opened => ChannelFrame::Opened { channel: String::new() },
        Said::Data(bytes) => ChannelFrame::Data { data: STANDARD.encode(bytes) },
        Said::End => ChannelFrame::End,
        Said::Exit(code) => ChannelFrame::Exit { code },
        Said::Failed(reason) => ChannelFrame::Failed { reason },
    }
}

/// What the processes of a worker are doing, of a channel that leads there.
pub fn stacks(opened: Opened) -> Telling {
    Box::pin(async move {
        let (_, mut reader) = opened.map_err(|e| ExecRefusal(e.to_string()))?;
        let mut bytes = Vec::new();
        loop {
            match reader.next().await {
                Some(Said::Data(more)) if bytes.len() + more.len() <= STACKS => bytes.extend(more),
                Some(Said::Data(_)) => {
                    return Err(ExecRefusal(format!("its processes tell more than {} MiB of stacks", STACKS >> 20)));
                }
                Some(Said::Failed(reason)) => return Err(ExecRefusal(reason)),
                Some(Said::Exit(_)) | None => break,
                Some(Said::Opened | Said::End) => {}
            }
        }
        serde_json::from_slice::<WorkerStacks>(&bytes)
            .map_err(|e| ExecRefusal(format!("its agent told stacks that are not understood: {e}")))
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use aviflow_agent::protocol::stacks::{Frame, ProcessStacks, PythonThread, Threads, WorkerStacks as Told};

    #[test]
    fn what_an_agent_tells_is_what_the_api_says() {
        let frame = Frame { file: "train.py".into(), line: 3, function: "step".into() };
        let python = PythonThread { id: "7f".into(), name: None, main: true, frames: vec![frame], cut: true };
        let threads = Threads {
            count: 2,
            name: "python".into(),
            main: true,
            state: "S".into(),
            call: Some("futex".into()),
            wait: None,
            kernel: vec!["futex_wait".into()],
        };
        let process = ProcessStacks {
            pid: 7,
            parent: 6,
            rank: Some(3),
            main: true,
            command: "python train.py".into(),
            python: vec![python],
            signature: Some("00ff".into()),
            threads: vec![threads],
            note: Some("cut".into()),
        };
        let told = serde_json::to_value(Told { processes: vec![process], omitted: 1 }).expect("JSON");
        let taken: WorkerStacks = serde_json::from_value(told.clone()).expect("understood");
        let mut said = serde_json::to_value(taken).expect("JSON");
        assert_eq!(said.as_object_mut().expect("an object").remove("worker"), Some(0.into()));
        assert_eq!(said, told);
    }
}
