package upstream

import (
	"context"
	"crypto/tls"
	"errors"
	"net"
	"syscall"
)

var (
	// ErrNoServers is the error of a group without servers.
	ErrNoServers = errors.New("no nameserver to ask")
	// ErrLoop is the error of a server that forwards queries back to this agent.
	ErrLoop = errors.New("its queries come back to this agent")
	// ErrTimeout is the error of a server that sent no reply in time.
	ErrTimeout = errors.New("no reply in time")
	// ErrMalformed is the error of a server whose reply cannot be parsed.
	ErrMalformed = errors.New("its reply is malformed")
	// ErrCrowded is the error of a query to a server that is not configured. It means that there are too
	// many such servers, or too many sockets to them.
	ErrCrowded = errors.New("queries for too many nameservers that are not configured are in flight")
	// ErrSilent is the error of a server that is down and owes replies to many queries (rule 7 in doc.go).
	ErrSilent = errors.New("no sign of life, and many queries wait for it already")
)

var errPeerClosed = errors.New("the server closed the connection")

// A noReply is the error of a query that no server answered. Its text may be sent to clients,
// so it is one short line.
type noReply struct {
	text   string
	causes []error
}

// Error returns a text with every server and its cause.
func (e *noReply) Error() string { return e.text }

// Unwrap returns the causes.
func (e *noReply) Unwrap() []error { return e.causes }

// refuses reports whether an error shows that the server cannot be used: for example, it refuses connections, or its
// certificate is not valid. A timeout does not show this, and neither does an error of this host.
func refuses(err error) bool {
	for _, sign := range []error{
		syscall.ECONNREFUSED, syscall.ECONNRESET, syscall.EHOSTUNREACH, syscall.ENETUNREACH, syscall.EHOSTDOWN,
		errPeerClosed,
	} {
		if errors.Is(err, sign) {
			return true
		}
	}
	var alert tls.AlertError
	var certificate *tls.CertificateVerificationError
	var header tls.RecordHeaderError
	return errors.As(err, &alert) || errors.As(err, &certificate) || errors.As(err, &header)
}

// cause returns the reason in an error, without the operation and the addresses that
// package net puts around it.
func cause(err error) error {
	var opError *net.OpError
	if errors.As(err, &opError) {
		if opError.Timeout() {
			return ErrTimeout
		}
		return opError.Err
	}
	if errors.Is(err, context.DeadlineExceeded) {
		return ErrTimeout
	}
	return err
}
