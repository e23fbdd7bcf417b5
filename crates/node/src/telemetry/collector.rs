//! The HTTP client that sends batches of spans to the collector: HTTP/1.1, a connection for each.

use std::future::poll_fn;
use std::io;
use std::pin::{Pin, pin};
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::Duration;

use axum::http::Uri;
use axum::http::header::{CONNECTION, HOST, HeaderValue};
use hyper::body::{Body, Incoming};
use hyper::client::conn::http1;
use hyper_util::rt::TokioIo;
use opentelemetry_http::{Bytes, HttpClient, HttpError, Request, Response, ResponseBodyTooLarge};
use tokio::net::TcpStream;
use tokio::runtime::{Builder, Runtime};

/// Limit of the body of a response. A collector answers with a few bytes.
const RESPONSE_MAX: usize = 4 << 20;
const HTTP_PORT: u16 = 80;

/// Sends requests from the exporter's thread, which waits for each.
#[derive(Debug)]
pub(super) struct CollectorClient {
    /// Its own, because spans are sent before and after the node's runtimes run. `None` in `drop`.
    runtime: Option<Runtime>,
    timeout: Duration,
    /// The last request failed, so that an outage is one line in the log.
    is_failing: AtomicBool,
}

impl CollectorClient {
    /// A client whose requests take at most `timeout` each.
    pub(super) fn new(timeout: Duration) -> io::Result<Self> {
        let runtime = Builder::new_current_thread().enable_io().enable_time().build()?;
        Ok(Self { runtime: Some(runtime), timeout, is_failing: AtomicBool::new(false) })
    }

    fn send(&self, request: Request<Bytes>) -> Result<Response<Bytes>, HttpError> {
        let runtime = self.runtime.as_ref().ok_or("the client is closed")?;
        let address = address(request.uri())?;
        let sent = runtime.block_on(async {
            let exchange = tokio::time::timeout(self.timeout, exchange(&address, request));
            exchange
                .await
                .unwrap_or_else(|_| Err(format!("no answer in {:?}", self.timeout).into()))
        });
        let failed = sent.as_ref().err().map(ToString::to_string);
        let refused = sent.as_ref().ok().map(Response::status).filter(|it| !it.is_success());
        self.log(&address, failed.or_else(|| refused.map(|status| format!("status {status}"))));
        sent.map_err(|error| {
            // By its type the exporter knows not to try again.
            let is_too_large = error.is::<ResponseBodyTooLarge>();
            let text = || format!("cannot send spans to {address}: {error}").into();
            if is_too_large { error } else { text() }
        })
    }

    /// Logs when the collector begins to fail and when it works again.
    fn log(&self, address: &str, error: Option<String>) {
        let was_failing = self.is_failing.swap(error.is_some(), Relaxed);
        match error {
            Some(error) if !was_failing => {
                tracing::warn!(address, error, "the trace collector does not accept spans");
            }
            None if was_failing => tracing::info!(address, "the trace collector accepts spans"),
            _ => {}
        }
    }
}

impl Drop for CollectorClient {
    fn drop(&mut self) {
        // Without waiting for a name resolution that hangs.
        self.runtime.take().into_iter().for_each(Runtime::shutdown_background);
    }
}

impl HttpClient for CollectorClient {
    fn send_bytes<'client, 'call>(
        &'client self,
        request: Request<Bytes>,
    ) -> Pin<Box<dyn Future<Output = Result<Response<Bytes>, HttpError>> + Send + 'call>>
    where
        'client: 'call,
    {
        Box::pin(async move { self.send(request) })
    }
}

/// `HOST:PORT` of a URL.
fn address(uri: &Uri) -> Result<String, HttpError> {
    let host = uri.host().ok_or("the URL of the collector has no host")?;
    Ok(format!("{host}:{}", uri.port_u16().unwrap_or(HTTP_PORT)))
}

/// Sends a request over a connection of its own and receives the response.
async fn exchange(address: &str, request: Request<Bytes>) -> Result<Response<Bytes>, HttpError> {
    let stream = TcpStream::connect(address).await.map_err(step("connect"))?;
    let handshake = http1::handshake(TokioIo::new(stream)).await;
    let (mut sender, connection) = handshake.map_err(step("connect"))?;
    let request = origin_form(request)?.map(axum::body::Body::from);
    let mut received = pin!(async {
        let response = sender.send_request(request).await.map_err(step("send the request"))?;
        let (head, body) = response.into_parts();
        Ok(Response::from_parts(head, read(body).await?))
    });
    // The connection moves the bytes. When it ends, the response has arrived or has failed.
    tokio::select! {
        biased;
        response = &mut received => response,
        _ = connection => received.await,
    }
}

/// The request as HTTP/1.1 sends it to a server: a path in the first line, the host as a header.
fn origin_form(mut request: Request<Bytes>) -> Result<Request<Bytes>, HttpError> {
    let authority = request.uri().authority().map_or("", |authority| authority.as_str());
    let host = HeaderValue::from_str(authority)?;
    let path = request.uri().path_and_query().map_or("/", |path| path.as_str()).parse()?;
    *request.uri_mut() = path;
    request.headers_mut().insert(HOST, host);
    request.headers_mut().insert(CONNECTION, HeaderValue::from_static("close"));
    Ok(request)
}

async fn read(mut body: Incoming) -> Result<Bytes, HttpError> {
    let mut bytes = Vec::new();
    while let Some(frame) = poll_fn(|context| Pin::new(&mut body).poll_frame(context)).await {
        let Ok(data) = frame.map_err(step("receive the response"))?.into_data() else { continue };
        if bytes.len() + data.len() > RESPONSE_MAX {
            return Err(ResponseBodyTooLarge::new().into());
        }
        bytes.extend_from_slice(&data);
    }
    Ok(bytes.into())
}

/// Names the step that failed. Hyper's errors say the cause only as their source.
fn step<E: std::error::Error>(what: &'static str) -> impl Fn(E) -> HttpError {
    move |error| {
        let source = error.source().map_or(String::new(), |source| format!(": {source}"));
        format!("{what}: {error}{source}").into()
    }
}

#[cfg(test)]
mod tests {
    use std::io::{Read as _, Write as _};
    use std::net::TcpListener;

    use cascade_runtime::{Clock as _, SystemClock};

    use super::*;

    /// Sends a request to a collector that answers with these bytes, and closes only with some.
    fn send(answer: &'static [u8]) -> Result<Response<Bytes>, HttpError> {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let collector = std::thread::spawn(move || {
            let mut stream = listener.accept().unwrap().0;
            let mut request = [0; 4096];
            let mut received = 0;
            while !request[..received].ends_with(b"spans") {
                received += stream.read(&mut request[received..]).unwrap();
            }
            // A client that has its answer, or does not want it, closes.
            let _is_sent = stream.write_all(answer).is_ok();
            while answer.is_empty() && stream.read(&mut request).is_ok_and(|count| count > 0) {}
        });
        let client = CollectorClient::new(Duration::from_millis(500)).unwrap();
        let request = Request::post(format!("http://{address}/v1/traces"));
        let response = client.send(request.body(Bytes::from_static(b"spans")).unwrap());
        collector.join().unwrap();
        response
    }

    #[test]
    fn a_response_is_returned_with_its_status_headers_and_body() {
        let response = send(b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nfine").unwrap();
        assert_eq!((response.status().as_u16(), &response.body()[..]), (200, &b"fine"[..]));
        let busy = b"HTTP/1.1 500 Busy\r\nRetry-After: 3\r\nTransfer-Encoding: chunked\r\n\r\n\
            2\r\nno\r\n0\r\n\r\n";
        let response = send(busy).unwrap();
        assert_eq!((response.status().as_u16(), &response.body()[..]), (500, &b"no"[..]));
        assert_eq!(response.headers()["retry-after"], "3");
        let until_closed = send(b"HTTP/1.1 200 OK\r\n\r\nto the end").unwrap();
        assert_eq!(&until_closed.body()[..], b"to the end");
    }

    #[test]
    fn a_collector_that_hangs_costs_the_time_limit() {
        let start = SystemClock.monotonic();
        let error = send(b"").unwrap_err().to_string();
        let took = SystemClock.monotonic().saturating_sub(start);
        assert!(took < Duration::from_secs(20), "{took:?}");
        assert!(error.starts_with("cannot send spans to 127.0.0.1:"), "{error}");
        assert!(error.ends_with("no answer in 500ms"), "{error}");
    }

    #[test]
    fn an_error_names_the_address_and_the_cause() {
        let address = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
        let client = CollectorClient::new(Duration::from_secs(10)).unwrap();
        let request = Request::post(format!("http://{address}/")).body(Bytes::new()).unwrap();
        let error = client.send(request).unwrap_err().to_string();
        assert!(error.starts_with(&format!("cannot send spans to {address}: connect:")), "{error}");
        assert!(error.contains("refused"), "{error}");
        let cut = send(b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nshort").unwrap_err();
        assert!(cut.to_string().contains("receive the response"), "{cut}");
        let other = send(b"SSH-2.0-OpenSSH\r\n\r\n").unwrap_err();
        assert!(other.to_string().contains("send the request"), "{other}");
    }

    #[test]
    fn a_response_that_is_too_long_is_refused() {
        static LONG: [u8; RESPONSE_MAX + 64] = {
            let mut bytes = [b'x'; RESPONSE_MAX + 64];
            let head = b"HTTP/1.1 200 OK\r\n\r\n";
            let mut at = 0;
            while at < head.len() {
                bytes[at] = head[at];
                at += 1;
            }
            bytes
        };
        assert!(send(&LONG).unwrap_err().is::<ResponseBodyTooLarge>());
    }

    #[test]
    fn a_url_becomes_an_address_a_path_and_a_host() {
        for (url, expected) in [
            ("http://127.0.0.1:4318/v1/traces", ("127.0.0.1:4318", "/v1/traces", "127.0.0.1:4318")),
            ("http://collector/a?b=c", ("collector:80", "/a?b=c", "collector")),
            ("http://[::1]:4318/v1/traces", ("[::1]:4318", "/v1/traces", "[::1]:4318")),
        ] {
            let request = Request::post(url).body(Bytes::new()).unwrap();
            let address = address(request.uri()).unwrap();
            let request = origin_form(request).unwrap();
            let host = request.headers()[HOST].to_str().unwrap();
            assert_eq!((&*address, &*request.uri().to_string(), host), expected);
        }
    }
}
