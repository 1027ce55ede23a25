// Package logonce logs a failure once, even if the operation is retried and fails again and again.
package logonce

import (
	"context"
	"log/slog"
	"regexp"
	"time"
)

// repeatEvery is how often a failure that repeats is logged again.
const repeatEvery = time.Minute

// A Log logs a failure once and then counts its repetitions. It logs the count
// once a minute, and when the failure changes or ends. It belongs to one goroutine.
type Log struct {
	log *slog.Logger

	// The failure that was logged last; text is "" if there is none. repeats counts how
	// often the failure was reported again since it was logged.
	level         slog.Level
	message, text string
	repeats       int
	logged        time.Time
	// recovered is true if the recovery was logged. A failure that comes and goes
	// is logged once, and its recovery once, until Reset.
	recovered bool
}

// New returns a Log that has logged nothing.
func New(log *slog.Logger) Log { return Log{log: log} }

// Report logs a failure with args. If the failure is the same as the previous failure, Report only counts it.
func (f *Log) Report(message string, level slog.Level, err error, args ...any) {
	text := differing.ReplaceAllString(err.Error(), "$1$2$3")
	if f.message == message && f.text == text && f.level == level {
		f.repeats++
		if time.Since(f.logged) >= repeatEvery {
			f.logRepeats()
		}
		return
	}
	f.Reset()
	f.level, f.message, f.text, f.logged, f.recovered = level, message, text, time.Now(), false
	f.log.Log(context.Background(), level, message, append([]any{"error", err}, args...)...)
}

// Recover logs message if a failure was reported since the last recovery.
func (f *Log) Recover(message string, args ...any) {
	if f.text == "" || f.recovered {
		return
	}
	f.recovered = true
	f.log.Info(message, append(args, "repeated", f.repeats)...)
	f.repeats = 0
}

// Reset forgets the failure: the next failure is logged, even if it is the same.
func (f *Log) Reset() {
	f.logRepeats()
	f.message, f.text = "", ""
}

// logRepeats logs how often the failure was repeated, if it was.
func (f *Log) logRepeats() {
	if f.repeats == 0 {
		return
	}
	f.log.Log(context.Background(), f.level, f.message, "error", f.text, "repeated", f.repeats)
	f.repeats, f.logged = 0, time.Now()
}

// differing matches what differs in each report of the same failure: the local port, as in
// "read tcp 10.0.0.1:41234->10.0.0.2:15012: …", and the time at which a certificate was found to have expired, as in
// "x509: certificate has expired or is not yet valid: current time 2026-11-26T16:00:00Z is after …".
var differing = regexp.MustCompile(`[0-9]*(->)|(current time )[^ ]+ (is )`)

// A Failure remembers the last failure of an operation, for callers that log failures themselves. The zero value
// means that there was no failure.
type Failure struct{ text string }

// Differs reports whether the caller should log err: err is not nil, and differs from the previous failure. Differs
// remembers err for the next call; if err is nil, the failure has ended.
func (f *Failure) Differs(err error) bool {
	previous := f.text
	f.text = ""
	if err != nil {
		f.text = err.Error()
	}
	return err != nil && f.text != previous
}

// Ended reports whether err is nil although the previous error was not, so the failure has ended. Call Ended before
// Differs, which replaces the previous error.
func (f *Failure) Ended(err error) bool { return err == nil && f.text != "" }

// Forget forgets the failure: the next failure is logged, even if it is the same.
func (f *Failure) Forget() { f.text = "" }
