package main

import (
	"github.com/coreos/go-systemd/v22/activation"

	"github.com/nametap/nametap/internal/listen"
)

// systemdSockets returns the sockets that systemd passes to this process; none without systemd. It returns an error if
// a program of another user may receive the packets of UDP sockets.
func systemdSockets() (*listen.Inherited, error) {
	inherited, err := listen.Inherit(activation.Files(true), true)
	if err != nil || !inherited.Unit() {
		return inherited, err
	}
	inodes, err := inherited.Inodes()
	if err != nil {
		return nil, err
	}
	return inherited, checkSquatters(inodes)
}
