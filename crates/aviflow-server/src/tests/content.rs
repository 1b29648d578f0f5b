use super::support::{Script, World, json, refusal, sha256, submission};
use crate::app::ServerConfig;
use axum::body::{Body, to_bytes};
use axum::http::StatusCode;
use std::fs;
use std::io::Read;
use std::os::unix::fs::symlink;

#[tokio::test]
async fn objects_are_stored_under_their_content() {
    let config = ServerConfig { max_upload: 10, ..ServerConfig::default() };
    let world = World::with(Script::default(), config);
    let hash = sha256(b"content");
    let path = format!("/v1/objects/{hash}");
    let head = async || {
        let response = world.send(world.request("HEAD", &path).body(Body::empty()).unwrap()).await;
        (response.status(), response.headers().get("content-length").map(|h| h.to_str().unwrap().to_owned()))
    };
    let put = async |path: &str, content: &str, length: bool| {
        let mut request = world.request("PUT", path);
        if length {
            request = request.header("content-length", content.len());
        }
        // Without a length it comes in pieces.
        let pieces: Vec<Result<Vec<u8>, std::io::Error>> = content.bytes().map(|b| Ok(vec![b])).collect();
        let body = Body::from_stream(tokio_stream::iter(pieces));
        json(world.send(request.body(body).unwrap()).await).await
    };
    assert_eq!(head().await.0, StatusCode::NOT_FOUND);
    let (status, value) = put(&path, "kontent", true).await;
    insta::assert_snapshot!(refusal(status, &value));
    let (status, value) = put(&path, "content", false).await;
    assert_eq!((status, value), (StatusCode::CREATED, serde_json::json!({ "sha256": hash, "bytes": 7 })));
    assert_eq!(head().await, (StatusCode::OK, Some("7".into())));
    assert_eq!(world.objects.read(&hash).unwrap(), b"content");
    let large = format!("/v1/objects/{}", sha256(b"content that is large"));
    for length in [true, false] {
        let (status, value) = put(&large, "content that is large", length).await;
        insta::assert_snapshot!("too_large", refusal(status, &value));
    }
    assert_eq!(put(&format!("{large}?allowBytes=100"), "content that is large", true).await.0, StatusCode::CREATED);
    let (status, value) = put("/v1/objects/..%2Fx", "x", true).await;
    insta::assert_snapshot!(refusal(status, &value));
    let broken = Body::from_stream(tokio_stream::iter([Ok("con"), Err(std::io::Error::other("gone"))]));
    let (status, value) = json(world.send(world.request("PUT", &path).body(broken).unwrap()).await).await;
    assert_eq!((status, value["code"].as_str()), (StatusCode::BAD_REQUEST, Some("badRequest")), "{value}");
}

#[tokio::test]
async fn files_come_as_an_archive_and_nothing_from_outside() {
    let world = World::new();
    world.submit(&submission("train")).await;
    insta::assert_snapshot!(world.refused("GET", "/v1/jobs/train/files", None).await);
    let volumes = world.folder.path().join("volumes/1");
    fs::create_dir_all(volumes.join("out/model/deep")).unwrap();
    fs::create_dir_all(volumes.join("ckpt")).unwrap();
    fs::write(volumes.join("out/model/weights.bin"), vec![7u8; 200_000]).unwrap();
    fs::write(volumes.join("out/model/deep/a.txt"), "a").unwrap();
    symlink("weights.bin", volumes.join("out/model/latest")).unwrap();
    let names = async |path: &str| {
        let response = world.send(world.request("GET", path).body(Body::empty()).unwrap()).await;
        assert_eq!(
            (response.status(), &response.headers()["content-type"]),
            (StatusCode::OK, &"application/x-tar".parse().unwrap())
        );
        let bytes = to_bytes(response.into_body(), 1 << 20).await.unwrap();
        let mut archive = tar::Archive::new(&bytes[..]);
        let mut names = Vec::new();
        for entry in archive.entries().unwrap() {
            let mut entry = entry.unwrap();
            let mut content = Vec::new();
            entry.read_to_end(&mut content).unwrap();
            names.push(format!("{} {}", entry.path().unwrap().display(), content.len()));
        }
        names
    };
    let files = "/v1/jobs/train/files";
    insta::assert_snapshot!(names(&format!("{files}?path=/out/model")).await.join("\n"));
    assert_eq!(names(&format!("{files}?path=out/model/deep/a.txt")).await, ["a.txt 1"]);
    assert_eq!(names(&format!("{files}?path=/out/model/latest")).await, ["latest 200000"]);
    insta::assert_snapshot!(names(files).await.join("\n"));
    for wrong in ["/out/../../2", "../x", "%2e%2e/x"] {
        let (status, _) = world.call("GET", &format!("{files}?path={wrong}"), None).await;
        assert_eq!(status, StatusCode::BAD_REQUEST, "{wrong}");
    }
    insta::assert_snapshot!(world.refused("GET", &format!("{files}?path=/out/modle/x"), None).await);
    insta::assert_snapshot!(world.refused("GET", &format!("{files}?path=/ckpt/100"), None).await);
    fs::write(world.folder.path().join("secret"), "s").unwrap();
    symlink(world.folder.path().join("secret"), volumes.join("out/model/deep/link")).unwrap();
    symlink(world.folder.path(), volumes.join("up")).unwrap();
    insta::assert_snapshot!(world.refused("GET", &format!("{files}?path=/out"), None).await);
    insta::assert_snapshot!(world.refused("GET", &format!("{files}?path=/up/token"), None).await);
    insta::assert_snapshot!(world.refused("GET", &format!("{files}?path=/up/missing"), None).await);
}
