package egress

import (
	"bytes"
	"net"
	"strings"
)

// http2Preface begins a connection of HTTP/2 without TLS, whose names are compressed (RFC 9113,
// section 3.4).
const http2Preface = "PRI * HTTP/2.0\r\n"

// httpName returns the host of the HTTP/1 request at the start of b, without the port: that of the
// target if it has one, else that of the Host field (RFC 9112, section 3.2). It needs no more than
// the head of the request. The errors are those of [helloName].
func httpName(b []byte) (string, error) {
	line, fields, complete := bytes.Cut(b, []byte("\n"))
	if err := checkRequestLine(line, complete); err != nil {
		return "", err
	}
	head, complete := cutHead(fields)
	if !complete {
		return "", errMore
	}
	host, err := hostField(head)
	if err != nil {
		return "", err
	}
	if authority, found := targetAuthority(line); found {
		host = authority
	}
	if host = withoutPort(host); host == "" {
		return "", errNoName
	}
	return host, nil
}

// maxMethod is the length in bytes of the longest method that counts as HTTP.
const maxMethod = 24

// checkRequestLine returns an error if line cannot be the first line of a request of HTTP/1, or the
// beginning of one if it is not complete.
func checkRequestLine(line []byte, complete bool) error {
	method, rest, found := bytes.Cut(line, []byte(" "))
	if len(method) > maxMethod || bytes.ContainsFunc(method, func(r rune) bool { return (r < 'A' || r > 'Z') && r != '-' }) {
		return malformed("the first bytes are neither TLS nor HTTP/1")
	}
	if !complete {
		return errMore
	}
	if strings.HasPrefix(string(line)+"\n", http2Preface) {
		return malformed("HTTP/2 without TLS, whose host cannot be read")
	}
	fields := bytes.Fields(rest)
	if !found || len(method) == 0 || len(fields) != 2 || !bytes.HasPrefix(fields[1], []byte("HTTP/1.")) {
		return malformed("the first line is not a request of HTTP/1")
	}
	return nil
}

// cutHead returns the fields before the empty line that ends a head.
func cutHead(b []byte) (head []byte, complete bool) {
	for at := 0; ; {
		end := bytes.IndexByte(b[at:], '\n')
		if end < 0 {
			return nil, false
		}
		if line := b[at : at+end]; len(line) == 0 || len(line) == 1 && line[0] == '\r' {
			return b[:at], true
		}
		at += end + 1
	}
}

// hostField returns the value of the one Host field; empty if there is none.
func hostField(head []byte) (string, error) {
	host, found := "", false
	for line := range bytes.Lines(head) {
		name, value, ok := bytes.Cut(line, []byte(":"))
		if !ok || line[0] == ' ' || line[0] == '\t' {
			return "", malformed("a line of the head is not a field")
		}
		if !strings.EqualFold(string(name), "host") {
			continue
		}
		if found { // a request with two must be answered with 400 (RFC 9112, section 3.2)
			return "", malformed("two Host fields")
		}
		host, found = string(bytes.TrimSpace(value)), true
	}
	return host, nil
}

// targetAuthority returns the authority of a request target in absolute or authority form.
func targetAuthority(line []byte) (authority string, found bool) {
	fields := strings.Fields(string(line))
	method, target := fields[0], fields[1] // checkRequestLine has counted them
	if method == "CONNECT" {
		return target, true
	}
	scheme, rest, found := strings.Cut(target, "://")
	if !found || strings.ContainsAny(scheme, "/?") {
		return "", false
	}
	if end := strings.IndexAny(rest, "/?#"); end >= 0 {
		rest = rest[:end]
	}
	return rest[strings.LastIndexByte(rest, '@')+1:], true
}

// withoutPort returns the host of HOST or HOST:PORT.
func withoutPort(authority string) string {
	if host, _, err := net.SplitHostPort(authority); err == nil {
		return host
	}
	return authority
}
