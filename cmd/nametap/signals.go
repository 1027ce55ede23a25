package main

import (
	"os"
	"os/signal"
	"syscall"
)

// endSignals are those that ask a command to end. SIGHUP is one of them: a terminal that
// closes ends what runs in it, and the agent needs no signal to read files again. Under
// nohup, which has it ignored, it stays ignored.
func endSignals() []os.Signal {
	signals := []os.Signal{syscall.SIGINT, syscall.SIGTERM}
	if !signal.Ignored(syscall.SIGHUP) {
		signals = append(signals, syscall.SIGHUP)
	}
	return signals
}

// withoutPipeSignal has writes to a pipe without a reader fail with an error instead of
// ending the process, which may have more to do than to write: to take rules out.
func withoutPipeSignal() { signal.Notify(make(chan os.Signal, 1), syscall.SIGPIPE) }

// onSecondSignal calls f when the end is asked for a second time. Signals after that do
// nothing.
func onSecondSignal(f func()) {
	signals := make(chan os.Signal, 1)
	signal.Notify(signals, endSignals()...)
	go func() {
		<-signals
		<-signals
		f()
	}()
}
