package main

import (
	"os"
	"os/signal"
	"slices"
	"syscall"
)

// endSignals returns the signals that end a command in an orderly way. SIGHUP is one of them, because a terminal that
// closes sends it to end the programs in the terminal. A command that was started by nohup still ignores SIGHUP.
func endSignals() []os.Signal {
	signals := []os.Signal{syscall.SIGINT, syscall.SIGTERM}
	if !signal.Ignored(syscall.SIGHUP) {
		signals = append(signals, syscall.SIGHUP)
	}
	return signals
}

// hangupReloads reports whether SIGHUP asks the agent to read its settings again, as with other daemons. It is true if
// a service manager runs the agent, or if the agent has no terminal. In a terminal, SIGHUP ends the agent.
func hangupReloads() bool {
	if signal.Ignored(syscall.SIGHUP) {
		return false
	}
	if os.Getenv("NOTIFY_SOCKET") != "" {
		return true
	}
	terminal, err := os.OpenFile("/dev/tty", os.O_RDONLY|syscall.O_NOCTTY, 0)
	if err != nil {
		return true
	}
	terminal.Close()
	return false
}

// agentSignals are the signals of a process that runs the agent.
type agentSignals struct {
	end      []os.Signal
	reload   <-chan os.Signal // nil if no signal asks to reload
	handOver chan os.Signal
}

// newAgentSignals returns the signals of this process. If SIGHUP is to reload the settings, it no longer ends the
// context of the command.
func newAgentSignals() agentSignals {
	signals := agentSignals{end: endSignals(), handOver: make(chan os.Signal, 1)}
	signal.Notify(signals.handOver, handOverSignal)
	if !hangupReloads() {
		return signals
	}
	signals.end = slices.DeleteFunc(signals.end, func(s os.Signal) bool { return s == syscall.SIGHUP })
	reload := make(chan os.Signal, 1)
	signal.Ignore(syscall.SIGHUP)
	signal.Notify(reload, syscall.SIGHUP)
	signals.reload = reload
	return signals
}

// onSecond calls f when a second signal asks for the end. Further signals do nothing.
func (s agentSignals) onSecond(f func()) {
	signals := make(chan os.Signal, 1)
	signal.Notify(signals, s.end...)
	go func() {
		<-signals
		<-signals
		f()
	}()
}

// handOverSignal ends an agent that another agent will follow, so the capture rules stay. It is the
// RestartKillSignal of nametap.service.
const handOverSignal = syscall.SIGUSR1

// onHandOver calls f after handOverSignal, which may have come before.
func (s agentSignals) onHandOver(f func()) {
	go func() {
		<-s.handOver
		f()
	}()
}

// withoutPipeSignal makes writes to a pipe without a reader fail with an error. Otherwise
// they would end the process, which may still have to remove rules.
func withoutPipeSignal() { signal.Notify(make(chan os.Signal, 1), syscall.SIGPIPE) }
