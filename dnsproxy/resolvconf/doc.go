// Package resolvconf reads resolv.conf(5), which says who the nameservers are, and
// tells of its changes.
//
//	files := resolvconf.Files{} // /etc/resolv.conf
//	conf, err := files.Read()
//	…
//	watcher := resolvconf.Watcher{Files: files, Current: conf, Changed: use, Failed: count}
//	err = watcher.Run(ctx)
package resolvconf
