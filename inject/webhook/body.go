package webhook

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"time"
)

// A body is a question that was read.
type body struct {
	text  []byte
	large bool
	// release returns what the question held. The text must not be used after it.
	release func()
}

// readBody reads a question; fails is the answer if that fails. A short question holds nothing while it is read,
// so clients that are slow keep no others waiting. A long one holds its bytes of the budget.
func (w *Webhook) readBody(ctx context.Context, to http.ResponseWriter, r *http.Request) (b body, fails *answer) {
	failed := func(a answer) (body, *answer) { return body{}, &a }
	if r.ContentLength > maxBody {
		return failed(tooLarge())
	}
	connection := http.NewResponseController(to)
	_ = connection.SetReadDeadline(time.Now().Add(bodyTimeout)) // a connection can do that
	from := http.MaxBytesReader(to, r.Body, maxBody)
	text, err := io.ReadAll(io.LimitReader(from, smallBody+1))
	release := func() {}
	large := len(text) > smallBody
	if err == nil && large {
		weight := r.ContentLength
		if weight < 0 {
			weight = 2 * maxBody // the buffer grows, and the previous one is garbage
		}
		p := w.bodies.take(ctx, weight, func() { _ = connection.SetReadDeadline(time.Unix(1, 0)) })
		if p == nil {
			return failed(busy())
		}
		release = func() { w.bodies.release(p) }
		_ = connection.SetReadDeadline(time.Now().Add(bodyTimeout))
		text, err = readRest(text, from, r.ContentLength)
		w.bodies.settle(p)
	}
	if err != nil {
		release()
		if errors.As(err, new(*http.MaxBytesError)) {
			return failed(tooLarge())
		}
		return failed(invalid(http.StatusBadRequest, fmt.Sprintf("reading the request: %v", err)))
	}
	_ = connection.SetReadDeadline(time.Time{}) // the server takes the end of the time for the end of the client
	return body{text, large, release}, nil
}

// readRest returns a text of a length, -1 if that is unknown, whose beginning was read.
func readRest(beginning []byte, from io.Reader, length int64) ([]byte, error) {
	if length < 0 {
		return io.ReadAll(io.MultiReader(bytes.NewReader(beginning), from))
	}
	text := make([]byte, length)
	_, err := io.ReadFull(from, text[copy(text, beginning):])
	return text, err
}
