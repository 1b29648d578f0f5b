//! One kept connection to the control plane: so little of a client that it does not show in a measurement.

use anyhow::{Context as _, Result, bail};
use serde_json::Value;
use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::TcpStream;
use std::time::Duration;

/// A connection.
pub struct Http {
    stream: BufReader<TcpStream>,
    host: String,
    token: String,
}

impl Http {
    /// Connects.
    pub fn connect(host: &str, token: &str) -> Result<Http> {
        let stream = TcpStream::connect(host).with_context(|| format!("cannot reach {host}"))?;
        stream.set_nodelay(true)?;
        stream.set_read_timeout(Some(Duration::from_secs(60)))?;
        Ok(Http { stream: BufReader::new(stream), host: host.to_owned(), token: token.to_owned() })
    }

    /// Reads something.
    pub fn get(&mut self, path: &str) -> Result<Value> {
        self.ask("GET", path, "")
    }

    /// Changes something.
    pub fn post(&mut self, path: &str, body: &Value) -> Result<Value> {
        self.ask("POST", path, &body.to_string())
    }

    fn ask(&mut self, method: &str, path: &str, body: &str) -> Result<Value> {
        let request = format!(
            "{method} {path} HTTP/1.1\r\nHost: {}\r\nAuthorization: Bearer {}\r\nContent-Type: application/json\r\n\
             Content-Length: {}\r\n\r\n{body}",
            self.host,
            self.token,
            body.len()
        );
        self.stream.get_mut().write_all(request.as_bytes())?;
        let status = self.line()?;
        let mut length = 0;
        let mut chunked = false;
        loop {
            let header = self.line()?.to_ascii_lowercase();
            if header.is_empty() {
                break;
            }
            if let Some(value) = header.strip_prefix("content-length:") {
                length = value.trim().parse()?;
            }
            chunked |= header.starts_with("transfer-encoding:") && header.contains("chunked");
        }
        let mut answer = Vec::new();
        if chunked {
            loop {
                let size = usize::from_str_radix(self.line()?.split(';').next().unwrap_or_default().trim(), 16)?;
                self.body(size, &mut answer)?;
                self.line()?;
                if size == 0 {
                    break;
                }
            }
        } else {
            self.body(length, &mut answer)?;
        }
        let code = status.split_whitespace().nth(1).unwrap_or_default();
        if !code.starts_with('2') {
            bail!("{method} {path}: {status}: {}", String::from_utf8_lossy(&answer));
        }
        Ok(if answer.is_empty() { Value::Null } else { serde_json::from_slice(&answer)? })
    }

    fn line(&mut self) -> Result<String> {
        let mut line = String::new();
        if self.stream.read_line(&mut line)? == 0 {
            bail!("{} closed the connection", self.host);
        }
        Ok(line.trim_end().to_owned())
    }

    fn body(&mut self, size: usize, into: &mut Vec<u8>) -> Result<()> {
        let from = into.len();
        into.resize(from + size, 0);
        Ok(self.stream.read_exact(&mut into[from..])?)
    }
}
